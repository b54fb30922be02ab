"""Figures that others published, with their hardware, source and caveats; the data lies in burst_cli/published/.

They are shown apart from runs of one's own: other hardware, other software, one timed iteration, other conventions.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from engine.config_schema import nearest
from engine.errors import ConfigError

_A800 = "A800-80GB"
_BURSTENGINE = (
    "One timed iteration per row, so no spread is known.",
    "MFU is causal-aware against 312 TFLOP/s, corrected for a factor 1.024 in the figures as they were published.",
    "Peak memory leaves out the phases of the loss and the optimizer.",
    "Micro-batch 1, parameters sharded over all GPUs, layers fully checkpointed with the policy named.",
)
_UNFUSED_LOSS = "The 7b baseline of LoongTrain gathered the logits for an unfused loss."
_KERNEL = ("The burst kernel ran in fp16, the others in bf16.", "Attention alone, forward and backward.")
_OTHERS = ("As the source words it; what a figure counts differs from row to row.",)


@dataclass(frozen=True)
class Published:
    """One published row; None is what was not published. metric and value: what is no tokens/s."""

    system: str
    method: str | None
    model: str | None
    hardware: str
    gpus: int | None
    seq_len: int | None
    status: str
    tokens_per_s_per_device: float | None
    peak_memory_gb: float | None
    mfu: float | None
    metric: str | None
    value: str | None
    source: str
    caveats: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "caveats": list(self.caveats)}


def load_published(name: str) -> tuple[Published, ...]:
    """The rows of one system, or of `all`. Raises ConfigError that lists the systems."""
    rows = tuple(row for file, read in _FILES.items() for row in map(read, _rows(file)))
    systems = sorted({row.system.lower() for row in rows})
    if name == "all":
        return rows
    if name.lower() not in systems:
        near = nearest(name, ["all", *systems])
        raise ConfigError(
            f"--published: there is nothing of {name!r}; {f'did you mean {near}? ' if near else ''}"
            f"legal: all, {', '.join(systems)}"
        )
    return tuple(row for row in rows if row.system.lower() == name.lower())


def caveats_of(rows: Sequence[Published]) -> tuple[str, ...]:
    """Every caveat once, with whose it is."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for caveat in row.caveats:
            found.setdefault(caveat, {})[row.system] = None
    return tuple(f"{', '.join(systems)}: {caveat}" for caveat, systems in found.items())


def _rows(file: str) -> list[dict[str, str]]:
    text = (resources.files("burst_cli") / "published" / file).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def _end_to_end(row: Mapping[str, str]) -> Published:
    return _burstengine(row, f"{row['method']}/{row['policy']}", row["model"])


def _ablation(row: Mapping[str, str]) -> Published:
    return _burstengine(row, row["step"], row["model"])


def _scaling(row: Mapping[str, str]) -> Published:
    return _burstengine(row, "burst/attn_out" if row["gpus"] == "32" else "burst", "14b")


def _burstengine(row: Mapping[str, str], method: str, model: str) -> Published:
    ran_out = row["tgs"] == "OOM"
    return Published(
        system="BurstEngine",
        method=method,
        model=model,
        hardware=_A800,
        gpus=int(row["gpus"]),
        seq_len=int(row["seq_len"]),
        status="oom" if ran_out else "completed",
        tokens_per_s_per_device=None if ran_out else _float(row["tgs"]),
        peak_memory_gb=None if ran_out else _float(row["peak_gb"]),
        mfu=_float(row.get("mfu_causal", "")),
        metric=None,
        value=None,
        source=row["source"],
        caveats=(*_BURSTENGINE, _UNFUSED_LOSS) if model == "7b" and method.startswith("loongtrain") else _BURSTENGINE,
    )


def _kernel(row: Mapping[str, str]) -> Published:
    return Published(
        system="BurstEngine",
        method=row["method"],
        model=f"attention, {row['heads']} heads of {row['head_dim']}",
        hardware=_A800,
        gpus=int(row["gpus"]),
        seq_len=int(row["seq_len"]),
        status="completed",
        tokens_per_s_per_device=None,
        peak_memory_gb=None,
        mfu=None,
        metric="TFLOP/s per GPU",
        value=row["tflops_per_gpu"],
        source=row["source"],
        caveats=_KERNEL,
    )


def _other(row: Mapping[str, str]) -> Published:
    is_speed = row["metric"].startswith("tokens/s/GPU")
    return Published(
        system=row["system"],
        method=None,
        model=row["model"] or None,
        hardware=row["hardware"],
        gpus=_int(row["gpus"]),
        seq_len=_int(row["seq_len"]),
        status="completed",
        tokens_per_s_per_device=_float(row["value"]) if is_speed else None,
        peak_memory_gb=None,
        mfu=None,
        metric=row["metric"],
        value=row["value"],
        source=row["source"],
        caveats=_OTHERS,
    )


def _float(text: str) -> float | None:
    return float(text) if text else None


def _int(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


_FILES: Mapping[str, Callable[[Mapping[str, str]], Published]] = {
    "burstengine_end_to_end.csv": _end_to_end,
    "burstengine_ablation.csv": _ablation,
    "burstengine_scaling_14b.csv": _scaling,
    "attention_forward_backward_32xA800.csv": _kernel,
    "single_node_and_others.csv": _other,
}
