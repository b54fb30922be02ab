"""Records of a run: provenance (code, versions, hardware), configuration, and a summary of its figures from the rows
of metrics.jsonl. No torch: trainer, launcher and report share it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.config.schema import hash_json, to_plain
from engine.config.settings import MemoryConfig, RunConfig, config_from_dict, load_config
from engine.runs.files import read_json_object, utc_now
from engine.runs.folder import RESOLVED_FILE
from engine.runs.process import meminfo_bytes

PACKAGES = ("burst-train", "torch", "numpy", "safetensors", "tokenizers", "pyyaml", "flash-attn", "triton")
IMAGE_VARIABLE = "BURST_IMAGE"
MAX_DIFF_CHARACTERS = 1_000_000
CODE_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 10.0


def python_path() -> str:
    """Return the PYTHONPATH of a process that runs this code, installed or not."""
    return os.pathsep.join(filter(None, [str(CODE_ROOT), os.environ.get("PYTHONPATH")]))


def collect_provenance() -> dict[str, Any]:
    """{collected_at, command, cwd, git, versions, hardware, image}; unknown ones are null.

    The git commit and uncommitted changes are those of the folder that holds the packages, where that is the top of a
    checkout (not if it is merely inside of one, as site-packages of a virtual environment may be).
    """
    return {
        "collected_at": utc_now(),
        "command": list(sys.argv),
        "cwd": str(Path.cwd()),
        "git": git_facts(CODE_ROOT),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
        "hardware": _hardware(),
        "image": os.environ.get(IMAGE_VARIABLE),
    }


def git_facts(root: Path) -> dict[str, Any] | None:
    """{sha, branch, dirty, status, diff, diff_truncated} of the checkout whose top is `root`, or None."""

    def git(*arguments: str) -> str:
        return output_of("git", "-C", str(root), *arguments) or ""

    top = git("rev-parse", "--show-toplevel").strip()
    if not top or Path(top).resolve() != root.resolve():
        return None
    status, diff = git("status", "--porcelain"), git("diff", "HEAD")
    return {
        "sha": git("rev-parse", "HEAD").strip() or None,
        "branch": git("rev-parse", "--abbrev-ref", "HEAD").strip() or None,
        "dirty": bool(status.strip()),
        "status": status.splitlines(),
        "diff": diff[:MAX_DIFF_CHARACTERS],
        "diff_truncated": len(diff) > MAX_DIFF_CHARACTERS,
    }


def _hardware() -> dict[str, Any]:
    gpus = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": meminfo_bytes("MemTotal"),
        "gpus": gpus.splitlines() if gpus else [],
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str | None:
    """Return the processor's name."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor() or None)


def output_of(*command: str) -> str | None:
    """Return the standard output of `command`, None if it is missing, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace") if result.returncode == 0 else None


# --- figures of the whole run -----------------------------------------------------------------------------------------


WARMUP_STEPS = 3  # of a run, which medians leave out; the last step counts always
# A median with its quartiles and the number of steps behind it.
MEDIANS = (
    "step_time_s",
    "batch_wait_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "mfu",
    "mfu_full_attention",
    "hfu",
    "comm_intra_bytes",
    "comm_inter_bytes",
    "comm_exposed_s",
    "comm_exposed_share",
    "offload_bytes",
    "offload_copy_s",
    "offload_exposed_s",
)
# Largest value over all steps; each row already holds the largest over ranks.
MAXIMA = ("peak_memory_bytes", "peak_memory_reserved_bytes", "peak_tensor_bytes", "peak_host_bytes")
# The last value that was measured; of loss it is called final_train_loss.
FINALS = ("loss", "validation_loss", "validation_bits_per_byte", "needle_accuracy", "needle_gain")
FINAL_TABLES = ("validation_loss_by_position", "needle_by_depth")  # which only runs that measured them have


def summarise(rows: Iterable[Mapping[str, Any]], warmup_steps: int = WARMUP_STEPS) -> dict[str, Any]:
    """{steps, tokens_total, dropped_steps, X, X_p25, X_p75, X_n for each of MEDIANS, maxima, final figures}.

    Unknown values are None.

    X is the median over the optimizer steps after the first `warmup_steps`, at least of the last one. When a step
    appears twice (a run that was taken up again), the later row counts. Without rows n is 0, X is None.
    """
    latest = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    ordered = [latest[step] for step in sorted(latest)]
    left_out = max(0, min(warmup_steps, len(ordered) - 1))
    # A step without labels computes nothing, so its time is no measurement.
    measured = [row for row in ordered[left_out:] if row.get("dropped") != "no_labels"]
    summary: dict[str, Any] = {
        "steps": ordered[-1]["step"] if ordered else 0,
        "tokens_total": sum(tokens) if (tokens := _numbers(ordered, "tokens")) else None,
        "dropped_steps": sum(row.get("dropped") is not None for row in ordered),
        "warmup_metric_steps": left_out,
    }
    for name in MEDIANS:
        summary.update(quartile_fields(name, _numbers(measured, name)))
    for name in MAXIMA:
        summary[name] = max(_numbers(ordered, name), default=None)
    for name in FINALS:
        summary[final_title(name)] = next(iter(reversed(_numbers(ordered, name))), None)
    for name in FINAL_TABLES:
        tables = [table for row in ordered if isinstance(table := row.get(name), list)]
        summary |= {f"final_{name}": tables[-1]} if tables else {}
    return summary


def final_title(name: str) -> str:
    """Return the key in a summary of the last value of a figure of FINALS."""
    return "final_train_loss" if name == "loss" else f"final_{name}"


def config_fingerprint(config: RunConfig) -> str:
    """Return the SHA-256 of the canonical JSON, 64 hex digits: equal exactly if every field is equal."""
    return hash_json(to_plain(config))


def policy_name(memory: MemoryConfig) -> str:
    """Describe the policy by its settings, such as `seq_fraction 0.5, 10 layers on host, tiles of 4096`."""
    details = {"seq_fraction": f" {memory.saved_fraction:g}", "attn_out_every": f" {memory.every_layers}"}
    kinds = memory.checkpoint_layers or (memory.activation_checkpoint,)
    parts = ["/".join(f"{kind}{details.get(kind, '')}" for kind in kinds)]
    if memory.activation_store:
        count = memory.host_layers
        layers = "" if count is None else f"{count} layer{'' if count == 1 else 's'} "
        parts.append(f"{layers}on {memory.activation_store}")
    parts += [f"tiles of {memory.tile_tokens}"] if memory.tile_tokens else []
    parts += ["optimizer on host"] if memory.optimizer_store == "host" else []
    return ", ".join(parts)


def config_facts(config: RunConfig) -> dict[str, Any]:
    """Return facts from the configuration alone: {config_fingerprint, attention_preset, memory_policy, ...}."""
    return {
        "config_fingerprint": config_fingerprint(config),
        "data_fingerprint": hash_json(to_plain(config.data)),
        "model": config.model.name,
        "attention_preset": config.attention.preset,
        "memory_policy": policy_name(config.memory),
        "seq_len": config.train.seq_len,
        "compute_dtype": config.train.compute_dtype,
        "world_size": config.cluster.world_size,
    }


def facts_of_run(path: Path) -> dict[str, Any]:
    """Return `config_facts` of the run in folder `path` as resolved; the fingerprint is that of config.yaml.

    Raises:
        ConfigError: config.yaml cannot be read.
    """
    requested = load_config(path / "config.yaml")
    return {**config_facts(resolved_config(path)), "config_fingerprint": config_fingerprint(requested)}


def resolved_config(path: Path) -> RunConfig:
    """Return the configuration that ranks of the run in folder `path` use; config.yaml if resolved.json is unreadable.

    Raises:
        ConfigError: neither resolved.json nor config.yaml can be read.
    """
    try:
        document = read_json_object(path / RESOLVED_FILE) or {}
        return config_from_dict(document["run"]["config"])
    except (OSError, ConfigError, ValueError, LookupError, TypeError):
        return load_config(path / "config.yaml")


def predicted_facts(memory_plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the predictions of memory_plan.json, with the keys of summary.json; empty without a prediction.

    predicted_peak_bytes    that one rank's device holds at most: to be read beside peak_memory_bytes on CUDA and beside
                            peak_tensor_bytes on a CPU
    predicted_step_time_s   of a step, beside step_time_s; by the rates of predicted_step_machine
    """
    plan, facts = memory_plan or {}, dict[str, Any]()
    if plan.get("device_peak_bytes") is not None:
        facts["predicted_peak_bytes"] = plan["device_peak_bytes"]
    step = plan.get("step_time")
    if isinstance(step, Mapping):
        facts["predicted_step_time_s"] = step.get("seconds")
        facts["predicted_step_machine"] = step.get("machine")
    return facts


def quartile_fields(name: str, values: Sequence[float]) -> dict[str, Any]:
    """{name: median, name_p25, name_p75, name_n}; quartiles by linear interpolation over the measured values."""
    quartiles: Sequence[float | None] = [float(values[0]) if values else None] * 3
    if len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
    low, middle, high = quartiles
    return {name: middle, f"{name}_p25": low, f"{name}_p75": high, f"{name}_n": len(values)}


def _numbers(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    values = (row.get(name) for row in rows)
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
