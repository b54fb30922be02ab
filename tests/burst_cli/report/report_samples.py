"""Small runs on disk for the tests of `burst report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config.cluster import ClusterConfig
from engine.config.settings import AttentionConfig, RunConfig, TrainConfig, dump_config
from engine.runs.files import json_text
from engine.runs.folder import RunFolder, create_run
from engine.runs.record import config_facts, summarise

CONFIG = RunConfig(
    attention=AttentionConfig(preset="ring"),
    train=TrainConfig(seq_len=512),
    cluster=ClusterConfig(ranks_per_node=2),
)
GIB = 2**30
PROVENANCE = {
    "command": ["burst", "launch", "exp=tiny"],
    "git": {"sha": "abc" * 13 + "d", "dirty": True, "diff": ""},
    "versions": {"torch": "2.13.0", "python": "3.11", "flash-attn": "2", "triton": "3", "burst-train": "1", "pip": "9"},
    "hardware": {"host": "node1", "gpus": []},
}


def metrics(step: int) -> dict[str, Any]:
    return {
        **{"step": step, "loss": 4.0 / step, "tokens": 1000, "step_time_s": 0.1 * step},
        **{"tokens_per_s": 10_000.0 / step, "tokens_per_s_per_device": 5000.0 / step, "mfu": 0.5},
        **{"mfu_full_attention": 0.6, "hfu": 0.7, "peak_memory_bytes": GIB, "comm_intra_bytes": 4096},
        **{"comm_inter_bytes": 0, "comm_exposed_s": None},
    }


def variant(preset: str, seq_len: int = 512, **train: Any) -> RunConfig:
    """CONFIG with another method or length."""
    return replace(
        CONFIG,
        attention=AttentionConfig(preset=preset),  # type: ignore[arg-type]
        train=replace(CONFIG.train, seq_len=seq_len, **train),
    )


def make_run(
    runs_dir: Path,
    name: str,
    *,
    config: RunConfig = CONFIG,
    steps: int = 4,
    final: str = "completed",
    row: Callable[[int], dict[str, Any]] = metrics,
    provenance: dict[str, Any] | None = None,
    **summary: Any,
) -> RunFolder:
    """A run that ended in state `final`, with a summary when it completed; final="running": it still runs."""
    files = {"config.yaml": dump_config(config), "provenance.json": json_text(provenance or PROVENANCE)}
    run = create_run(runs_dir / name, files, world_size=2)
    run.transition("starting")
    run.transition("running")
    for step in range(1, steps + 1):
        run.append_metrics(row(step))
    if final == "completed":
        facts = {
            **config_facts(config),
            "peak_flops_per_device": 1e12,
            "peak_flops_source": "measured",
            "device": "cpu",
        }
        run.write_summary({"status": "completed", **facts, **summarise(run.read_metrics(), 1), **summary})
    if final == "running":
        return run
    run.transition(final, failure=None if final == "completed" else {"rank": 1, "message": "no"})
    return run


def make_methods(runs_dir: Path) -> None:
    """Three methods at two lengths: `burst` is twice as fast as `ring`; `ulysses` runs out of memory at 1024."""
    place = 0
    for seq_len in (512, 1024):
        for preset, factor in (("ring", 1.0), ("burst", 2.0), ("ulysses", 1.5)):
            place += 1
            final = "oom" if (preset, seq_len) == ("ulysses", 1024) else "completed"

            def row(step: int, speed: float = 1000 * factor * 512 / seq_len) -> dict[str, Any]:
                return {**metrics(step), "tokens_per_s_per_device": speed + step, "mfu": speed / 1e4}

            make_run(
                runs_dir,
                f"tiny/20260101-00000{place}-{place:06x}",
                config=variant(preset, seq_len),
                steps=0 if final == "oom" else 8,
                final=final,
                row=row,
                predicted_peak_bytes=1.05 * GIB,
            )
