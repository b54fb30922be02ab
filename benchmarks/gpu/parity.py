"""Part parity: every preset on several ranks that share one GPU trains as one rank does.

Messages go through host memory over gloo, since NCCL refuses ranks on one device; on a CPU they go directly. In float32
with the reference kernel differences are rounding; in bf16 with the device's own kernel they are its errors.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.gpu.plan import Measurement, Part, Row
from engine.attention.library import resolve_here
from engine.bench.ranks import RankProgram, run_ranks
from engine.bench.spec import RankSetup
from engine.config.cluster import ClusterConfig
from engine.config.errors import RunError
from engine.config.schema import read_dataclass, to_plain
from engine.config.settings import (
    AttentionConfig,
    Dtype,
    KernelName,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PresetName,
    RunConfig,
    TrainConfig,
)
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.distributed.mesh import build_mesh, read_placement, start_process_group
from engine.parallel.parallelize import build_model
from engine.planning.methods.presets import PRESETS
from engine.resolve.legality import check_run
from engine.training.train_step import TrainStep, count_batches, rank_batch

CASE_FILE, ROWS_FILE = "case.json", "rows.jsonl"
REFERENCE_FILE = "alone_{}.npz"
MODEL = ModelConfig(
    name="parity",
    vocab_size=256,
    hidden_size=64,
    ffn_hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    init_std=0.1,
)
# float32: sums in another order; 1e-6 seen on CPUs, where products are rounded alike. bf16: rounding of every
# intermediate result, of which gradients of norms that nearly cancel keep most; 2e-2 seen.
LIMITS: Mapping[Dtype, float] = {"float32": 1e-4, "bfloat16": 5e-2}
MAX_RESTARTS = 2


@dataclass(frozen=True)
class ParityCase:
    """Presets that are compared on one group of ranks; the sequence divides by no number of ranks."""

    device: str
    ranks: int
    presets: tuple[PresetName, ...]
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    seq_len: int = 250
    steps: int = 2

    def run_config(self, preset: PresetName, dtype: Dtype, ranks: int) -> RunConfig:
        """The configuration of a preset; raises ConfigError where so many ranks cannot run it."""
        kernel: KernelName = "reference" if dtype == "float32" and self.device == "cuda" else "auto"
        extra: dict[str, Any] = {"chunk_tokens": 16} if PRESETS[preset].chunked else {}
        tp_size = ranks if preset == "megatron_tp" else 1
        config = RunConfig(
            exp="parity",
            model=MODEL,
            attention=AttentionConfig(preset=preset, kernel=kernel, **extra),
            memory=MemoryConfig(activation_checkpoint="none"),
            loss=LossConfig(chunk_tokens=64),
            optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant"),
            parallel=ParallelConfig(tp_size=tp_size),
            train=TrainConfig(seq_len=self.seq_len, steps=self.steps, compute_dtype=dtype),
            cluster=ClusterConfig(
                backend="gloo",
                ranks_share_device=self.device == "cuda",
                topology_nodes=2 if ranks == 4 and preset not in ("megatron_tp", "megatron_allgather") else 1,
            ),
        )
        check_run(config)
        return config


@dataclass(frozen=True)
class ParitySizes:
    """Numbers of ranks and presets."""

    ranks: tuple[int, ...] = (2, 4)
    presets: tuple[PresetName, ...] = tuple(name for name in PRESETS if name != "single")
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    expected_s: float = 30.0
    weight: float = 4.0


SMALL = ParitySizes(ranks=(2,), presets=("burst", "ulysses"), dtypes=("float32",), expected_s=12.0)


def plan(sizes: ParitySizes) -> Part:
    """A measurement per number of ranks: starting them takes most of its time."""
    return Part("parity", "Several ranks on one device", sizes.weight, tuple(_plan(sizes, n) for n in sizes.ranks))


def _plan(sizes: ParitySizes, ranks: int) -> Measurement:
    settings = {"ranks": ranks, "presets": list(sizes.presets), "dtypes": list(sizes.dtypes)}
    # Fresh: the worker's own process group of one rank must not meet that of another part.
    return Measurement(
        f"{ranks} ranks", "benchmarks.gpu.parity:measure", settings, expected_s=sizes.expected_s, fresh=True
    )


def measure(device: torch.device, ranks: int, presets: Sequence[PresetName], dtypes: Sequence[Dtype]) -> list[Row]:
    """A row per preset and dtype. A preset whose ranks fail or hang has a row with their words; the others go on."""
    case = ParityCase(device.type, ranks, tuple(presets), tuple(dtypes))
    with tempfile.TemporaryDirectory(prefix="burst-parity-") as name:
        folder = Path(name)
        for dtype in case.dtypes:
            write_reference(case, dtype, folder)
        rows: list[Row] = []
        left = list(case.presets)
        for _ in range(1 + MAX_RESTARTS):
            problem = _run(replace(case, presets=tuple(left)), folder)
            found = _read_rows(folder)
            rows += found
            done = {row["preset"] for row in found if row["dtype"] == case.dtypes[-1]}
            left = [preset for preset in left if preset not in done]
            if not left:
                return rows
            failed = left.pop(0)
            rows.append(_row(case, failed) | {"status": "failed", "error": problem or "its ranks wrote nothing"})
        reason = f"not tried: {1 + MAX_RESTARTS} presets failed before it"
        return rows + [_row(case, preset) | {"status": "skipped", "error": reason} for preset in left]


def _row(case: ParityCase, preset: PresetName) -> Row:
    return {"label": f"{preset} on {case.ranks} ranks", "preset": preset, "ranks": case.ranks}


def _run(case: ParityCase, folder: Path) -> str | None:
    """Starts the ranks and waits; what went wrong, or None."""
    (folder / CASE_FILE).write_text(json.dumps(to_plain(case)), encoding="utf-8")
    for old in (folder / ROWS_FILE, folder / "store"):
        old.unlink(missing_ok=True)
    try:
        run_ranks(RankProgram("benchmarks.gpu.parity_rank"), RankSetup(ranks=case.ranks), folder)
    except RunError as error:
        return " ".join(str(error).split())[-900:]
    return None


def _read_rows(folder: Path) -> list[Row]:
    path = folder / ROWS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_case(folder: Path) -> ParityCase:
    """The case of a folder."""
    case, _ = read_dataclass(ParityCase, json.loads((folder / CASE_FILE).read_text(encoding="utf-8")))
    return case


def write_reference(case: ParityCase, dtype: Dtype, folder: Path) -> None:
    """Losses and gradients of one rank, computed in this process."""
    placement = read_placement({})
    if not dist.is_initialized():
        start_process_group(torch.device("cpu"), placement)  # gloo, as the ranks have it
    found = train(case, "single", dtype, 1)
    np.savez(folder / REFERENCE_FILE.format(dtype), **found)


def train(case: ParityCase, preset: PresetName, dtype: Dtype, ranks: int) -> dict[str, Any]:
    """{"losses": [steps], parameter: gradient of the first batch}, whole on every rank, as float64. Collective."""
    config = case.run_config(preset, dtype, ranks)
    mesh = build_mesh(config.parallel, config.cluster)
    model, attention = build_model(resolve_here(config, mesh), mesh)
    batch = _batch(case)
    local = rank_batch(batch, model, attention, mesh)
    labels, _ = count_batches([local], mesh)
    hidden = model(local.rows.tokens, local.rows.positions, local.attention)
    (model.head(hidden, local.rows.labels) / labels).backward()
    found = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    step = TrainStep(config, mesh, model, attention)
    losses = [step(number, [batch]).loss for number in range(case.steps)]
    return {"losses": np.array(losses), **found}


def _batch(case: ParityCase) -> Batch:
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (1, case.seq_len))
    labels = np.concatenate([tokens[:, 1:], [[IGNORE_INDEX]]], axis=1)
    return Batch(tokens, labels, (np.zeros(1, dtype=np.int64),), (0,))


def _whole(tensor: Any) -> Any:
    """Gathered in host memory: what torch 2.11 wraps gathered GPU tensors in crashes (SIGSEGV)."""
    if isinstance(tensor, DTensor):
        mesh, own = _host_mesh(tensor.device_mesh), tensor.to_local().cpu()
        shape = {"shape": tensor.shape, "stride": tensor.stride()}
        tensor = DTensor.from_local(own, mesh, tensor.placements, run_check=False, **shape).full_tensor()
    return tensor.detach().double().cpu().numpy()


@lru_cache
def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh("cpu", mesh.mesh)


def compare(
    case: ParityCase, preset: PresetName, dtype: Dtype, found: Mapping[str, Any], alone: Mapping[str, Any]
) -> Row:
    """One row: relative differences of losses and of the worst gradient, and whether they are within the limit."""
    loss = float(np.max(np.abs(found["losses"] - alone["losses"]) / np.abs(alone["losses"])))
    names = [name for name in alone if name != "losses"]
    differences = {
        name: float(np.linalg.norm(found[name] - alone[name]) / np.linalg.norm(alone[name])) for name in names
    }
    worst = max(differences, key=differences.__getitem__)
    row = _row(case, preset) | {"dtype": dtype, "loss_difference": loss, "gradient_difference": differences[worst]}
    row |= {"worst_gradient": worst, "limit": LIMITS[dtype]}
    equal = max(loss, differences[worst]) <= LIMITS[dtype]
    return row | ({} if equal else {"status": "failed", "error": f"differs from one rank by more than {LIMITS[dtype]}"})
