"""Made-up runs for measuring `burst report`: figures that look like training, names that say they are synthetic."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engine.config.cluster import ClusterConfig
from engine.config.settings import AttentionConfig, RunConfig, TrainConfig, dump_config
from engine.runs.record import WARMUP_STEPS, config_facts, predicted_facts, summarise

PRESETS = ("burst", "megatron_cp", "loongtrain", "ring", "ulysses", "usp")
LENGTHS = (65536, 131072, 262144, 524288, 1048576)
SIZES = {"synthetic_7b": 8, "synthetic_13b": 32, "synthetic_70b": 64}  # experiment -> ranks
DEVICE = "SYNTHETIC accelerator"
_START = datetime(2026, 1, 1, tzinfo=UTC)
_CAPACITY_GIB = 80.0
_SPEED = {"burst": 1.0, "megatron_cp": 0.88, "loongtrain": 0.93, "ring": 0.72, "ulysses": 0.8, "usp": 0.9}
_MEMORY = {"burst": 1.0, "megatron_cp": 1.03, "loongtrain": 1.25, "ring": 1.02, "ulysses": 1.6, "usp": 1.3}


@dataclass(frozen=True)
class _Shape:
    """What one run is."""

    exp: str
    preset: str
    seq_len: int
    world_size: int

    @property
    def memory_gib(self) -> float:
        """Grows with the local length; some methods keep more than others."""
        return 18 + 43 * _MEMORY[self.preset] * self.seq_len / 1048576 * 32 / self.world_size


def make_runs(runs_dir: Path, count: int, *, steps: int = 40, seed: int = 0) -> None:
    """`count` runs: three experiments, six methods, five lengths, repeated; some failed, some ran out of memory."""
    chance = random.Random(seed)
    shapes = [
        _Shape(exp, preset, seq_len, ranks) for exp, ranks in SIZES.items() for seq_len in LENGTHS for preset in PRESETS
    ]
    configs: dict[_Shape, tuple[str, Mapping[str, Any]]] = {}
    for index in range(count):
        shape = shapes[index % len(shapes)]
        if shape not in configs:
            config = _config(shape)
            configs[shape] = (dump_config(config), config_facts(config))
        made = _START + timedelta(minutes=17 * index)
        folder = runs_dir / shape.exp / f"{made:%Y%m%d-%H%M%S}-{chance.randrange(16**6):06x}"
        folder.mkdir(parents=True)
        _write(folder, shape, configs[shape], made, steps, chance)


def _config(shape: _Shape) -> RunConfig:
    default = RunConfig()
    return replace(
        default,
        exp=shape.exp,
        model=replace(default.model, name=shape.exp.partition("_")[2]),
        attention=AttentionConfig(preset=shape.preset),  # type: ignore[arg-type]
        train=TrainConfig(seq_len=shape.seq_len),
        cluster=ClusterConfig(ranks_per_node=8, num_nodes=shape.world_size // 8),
    )


def _write(
    folder: Path,
    shape: _Shape,
    config: tuple[str, Mapping[str, Any]],
    made: datetime,
    steps: int,
    chance: random.Random,
) -> None:
    status = "oom" if shape.memory_gib > _CAPACITY_GIB else "failed" if chance.random() < 0.03 else "completed"
    rows = [] if status == "oom" else _rows(shape, steps if status == "completed" else steps // 3, chance)
    (folder / "config.yaml").write_text(config[0])
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _json(folder / "run.json", _state(shape, status, made, sum(row["step_time_s"] for row in rows)))
    _json(folder / "provenance.json", _provenance(made, shape))
    if status == "completed":
        predicted = {"device_peak_bytes": shape.memory_gib * 2**30 * chance.uniform(0.96, 1.03), "source": "synthetic"}
        facts = {"device": DEVICE, "peak_flops_per_device": 989e12, "peak_flops_source": "synthetic"}
        _json(
            folder / "summary.json",
            {"status": status, **config[1], **facts, **predicted_facts(predicted), **summarise(rows)},
        )


def _rows(shape: _Shape, steps: int, chance: random.Random) -> list[dict[str, Any]]:
    speed = 2400 * _SPEED[shape.preset] * (65536 / shape.seq_len) ** 0.72 * chance.uniform(0.97, 1.03)
    drift, rows = 0.0, []
    for step in range(1, steps + 1):
        drift = 0.8 * drift + chance.gauss(0, 0.01)
        now = speed * (1 + drift) * (0.5 if step <= WARMUP_STEPS else 1.0)
        seconds = shape.seq_len / now / shape.world_size
        mfu = 0.36 * _SPEED[shape.preset] * (1 + drift) + 0.02 * (shape.seq_len / 1048576)
        rows.append(
            {
                "step": step,
                "loss": 11 * step**-0.22 + chance.gauss(0, 0.06),
                "grad_norm": 1.0,
                "tokens": shape.seq_len,
                "step_time_s": seconds,
                "tokens_per_s": now * shape.world_size,
                "tokens_per_s_per_device": now,
                "mfu": mfu,
                "mfu_full_attention": 1.7 * mfu,
                "hfu": 1.2 * mfu,
                "peak_memory_bytes": int(shape.memory_gib * 2**30),
                "comm_intra_bytes": 2**34,
                "comm_inter_bytes": 2**33,
                "comm_exposed_s": None,
            }
        )
    return rows


def _state(shape: _Shape, status: str, made: datetime, seconds: float) -> dict[str, Any]:
    moments = [made, made + timedelta(seconds=20), made + timedelta(seconds=50), made + timedelta(seconds=55 + seconds)]
    texts = [f"{moment:%Y-%m-%dT%H:%M:%S}.000Z" for moment in moments]
    states = ("planned", "starting", "running", status)
    failure = {"kind": status, "message": "synthetic: CUDA out of memory"} if status != "completed" else None
    return {
        "state": status,
        "attempt": 1,
        "host": "synthetic",
        "pid": 1,
        "pid_start": "1",
        "started_at": texts[1],
        "ended_at": texts[3],
        "exit_code": 0 if status == "completed" else 1,
        "failure": failure,
        "history": [{"state": state, "at": text} for state, text in zip(states, texts, strict=True)],
        "world_size": shape.world_size,
    }


def _provenance(made: datetime, shape: _Shape) -> dict[str, Any]:
    return {
        "collected_at": f"{made:%Y-%m-%dT%H:%M:%S}.000Z",
        "command": ["burst", "launch", f"exp={shape.exp}", f"attention={shape.preset}"],
        "git": {"sha": f"{made.month:x}" * 40, "branch": "main", "dirty": False, "diff": "", "diff_truncated": False},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "burst-train": "0.1.0"},
        "hardware": {"host": "synthetic", "gpus": [f"{DEVICE}, 81559 MiB, 570.1"] * 8},
        "image": None,
    }


def _json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2))
