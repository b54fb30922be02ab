"""What is predicted for runs that others published, over what they measured: time and memory, row by row.

Every row of `published/figures.csv` that says enough is planned as this engine would run it, on a
model of its machine. Rows in FITTED were looked at when constants of devices were chosen; all others were not.

    python -m benchmarks.bench_published --output benchmarks/results/published_YYYYMM.json
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from burst_cli.compose import compose
from engine.config.settings import RunConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.flops import count_parameters
from engine.predict.machine import Machine, find_machine
from engine.predict.memory import Predict, shared_predictor
from engine.predict.step_time import HOST_BYTES_PER_S, UPDATE_BYTES, predict_step, replayed_attention
from engine.resolve.attention import resolve_attention
from engine.resolve.degrees import sequence_topology

NODE_RANKS = 8
NOTEWORTHY = 1.1  # published figures that differ by more must be predicted in their order
# Four ports of 200 Gbit/s for eight devices.
MACHINES = {"A800-80GB": find_machine("a800", {"inter_bytes_per_s": 12.5e9}), "8xH100": find_machine("h100")}
MODELS = {
    "7b": ["model=llama7b"],
    "14b": ["model=llama14b", "model.vocab_size=120000"],
    "attention, 40 heads of 128": ["model=llama14b", "model.num_layers=1"],
    "attention, 32 heads of 128": ["model=llama7b", "model.num_layers=1"],
    "Llama-3-8B": ["model=llama8b"],
    "Qwen3-8B": ["model=qwen3_8b"],
    "Qwen3-30B-A3B": ["model=qwen3_30b_a3b"],
}
BURST = ["attention=burst", "attention.backward_circulates=q"]
# The published names in the words of this engine: method, and policy where the name does not say it.
METHODS = {
    "burst": (BURST, "attn_out"),
    "burst_ulysses": (["attention=burst_ulysses"], "attn_out"),
    "ulysses": (["attention=ulysses"], "full"),
    "megatron_cp": (["attention=megatron_cp"], "full"),
    "loongtrain_usp": (["attention=usp"], "full"),
    "usp_head_first": (["attention=usp"], "full"),
    "usp_context_first": (["attention=usp", "attention.placement=context_first"], "full"),
    "loongtrain_double_ring": (["attention=loongtrain", "attention.head_parallel_size=1"], "full"),
    "flat ring with out circulated": (["attention=ring"], "full"),
    "+ backward communication optimisation": (
        [*BURST, "attention.ring_inner_size=32", "attention.ring_outer_size=1"],
        "full",
    ),
    "+ double ring": (BURST, "full"),
    "+ fused LM head and loss": (BURST, "full"),
    "+ sequence-level selective checkpointing": (BURST, "seq_fraction"),
    "(or) + whole attention output kept": (BURST, "attn_out"),
    "": (["attention=megatron_allgather"], "full"),  # the context parallelism of torch
}
FITTED = {
    ("attention, 32 heads of 128", "burst", 4194304): "the rate of attention kernels under load",
    ("14b", "burst", 32768): "the rate of products under load",
    ("attention, 40 heads of 128", "burst", 262144): "what messages cost kernels",
}

# Methods whose published runs computed the loss from whole logits, which this engine never has: what they keep is added
# to its own. A loss that is not fused keeps log-probabilities in fp32 for backward, as torch.autocast runs log_softmax.
WHOLE_LOGITS = {
    "loongtrain_usp", "loongtrain_double_ring", "ulysses", "flat ring with out circulated",
    "+ backward communication optimisation", "+ double ring",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published figure: tokens/s per device, or TFLOP/s of attention per device; and a peak in decimal gigabytes."""

    system: str
    model: str
    method: str
    hardware: str
    gpus: int
    seq_len: int
    speed: float
    peak_gb: float | None

    @property
    def is_kernel(self) -> bool:
        """Attention alone, forward and backward."""
        return self.model.startswith("attention")

    @property
    def scaled_down(self) -> bool:
        """Whether a constant was chosen by it."""
        return (self.model, self.method, self.seq_len) in FITTED

    @property
    def unlike(self) -> str | None:
        """Why its peak is another thing than what is predicted (it is shown all the same); None: it is the same."""
        if self.offloaded:
            return "16-bit weights and gradients stayed on the device"
        return "another gather of keys and values" if not self.method else None

    @property
    def whole_logits_gb(self) -> float:
        """What its loss kept of this rank's tokens for backward; 0 where it was fused."""
        is_whole = self.method.partition("/")[0] in WHOLE_LOGITS
        return 4 * self.seq_len / self.gpus * self.config.model.vocab_size / 1e9 * is_whole

    @property
    def offloaded(self) -> bool:
        """Whether its optimizer lay on the host, as the source says of its scaling rows."""
        return self.system == "BurstEngine" and self.gpus <= 16

    @property
    def machine(self) -> Machine:
        """What it ran on."""
        return MACHINES[self.hardware]

    @property
    def world(self) -> Topology:
        """Where its ranks lay."""
        nodes = max(1, self.gpus // NODE_RANKS)
        return Topology(nodes, self.gpus // nodes)

    @cached_property
    def config(self) -> RunConfig:
        """It as this engine runs it."""
        name, _, policy = self.method.partition("/")
        method, usual = METHODS[name]
        policy = "none" if self.is_kernel else policy.removesuffix("_0.5") or usual
        alone = self.gpus == 1
        return compose(
            [
                *MODELS[self.model],
                *(["attention=single"] if alone else method),
                f"memory={policy}",
                f"train.seq_len={self.seq_len}",
                "train.compute_dtype=bfloat16",
                f"cluster.ranks_per_node={self.gpus}",
                f"cluster.topology_nodes={self.world.nodes}",
                *(["memory.optimizer_store=host"] if self.offloaded else []),
            ]
        ).config

    @property
    def resolved_method(self) -> AttentionMethod:
        """The attention of all its ranks, which share one sequence."""
        return resolve_attention(self.config, sequence_topology(self.config, self.world), self.machine)

    def predicted_speed(self) -> float:
        """In the unit of the published one."""
        config = self.config
        if not self.is_kernel:
            step = predict_step(config, self.resolved_method, self.world, self.machine)
            seconds = step.seconds
            if self.offloaded:  # an update after backward, as offloading usually has it; ours hides behind forward
                numbers = count_parameters(config.model).total / self.world.nodes
                seconds += numbers * UPDATE_BYTES / HOST_BYTES_PER_S - step.parts.optimizer
            return step.tokens / seconds / self.world.size
        pairs = self.seq_len * (self.seq_len + 1) / 2
        flops = 3.5 * 4 * config.model.num_heads * config.model.head_dim * pairs / self.gpus
        return flops / replayed_attention(config, self.resolved_method, self.world, self.machine).time.seconds / 1e12

    def predicted_gb(self, predict: Predict) -> float:
        """Peak of tensors on the device, of the phases that the source counted: forward and backward."""
        phases = predict(self.config, self.resolved_method, self.world).phase_peaks
        return max(phases["forward"], phases["backward"]) / 1e9 + self.whole_logits_gb


def published_rows() -> list[Row]:
    """All rows with a speed of a machine, a model and a method that are known here; each once."""
    text = Path(__file__).with_name("published").joinpath("figures.csv").read_text(encoding="utf-8")
    rows = dict[Row, None]()
    for record in csv.DictReader(text.splitlines()):
        kernel = record["metric"] == "TFLOP/s per GPU"
        speed = record["value"] if kernel else record["tokens_per_s_per_device"]
        known = record["model"] in MODELS and record["hardware"] in MACHINES
        if not speed or record["status"] != "completed" or not known or record["method"].split("/")[0] not in METHODS:
            continue
        peak = float(record["peak_memory_gb"]) if record["peak_memory_gb"] else None
        system, model, method, hardware = (record[name] for name in ("system", "model", "method", "hardware"))
        gpus, seq_len = int(record["gpus"]), int(record["seq_len"])
        rows[Row(system, model, method, hardware, gpus, seq_len, float(speed), peak)] = None
    return list(rows)


def compare(rows: Sequence[Row], predict: Predict | None) -> dict[str, Any]:
    """Every row with its ratios, median errors, and the orders of methods; without memory where `predict` is None."""
    found: list[dict[str, Any]] = []
    for row in rows:
        ratios = {"time_ratio": row.speed / row.predicted_speed(), "peak_ratio": None}  # predicted over published
        if row.peak_gb and predict:
            ratios["peak_ratio"] = row.predicted_gb(predict) / row.peak_gb
        found.append({**asdict(row), "scaled_down": row.scaled_down, "peak_unlike": row.unlike, **ratios})
        print(_line(found[-1]), flush=True)
    time = {
        name: _median_error([one["time_ratio"] for one in found if of(one)])
        for name, of in (
            ("all", lambda one: True),
            ("scaled_down", lambda one: one["scaled_down"]),
            ("not scaled_down", lambda one: not one["scaled_down"]),
        )
    }
    peaks = {
        name: [one["peak_ratio"] for one in found if one["peak_ratio"] and of(one)]
        for name, of in (("all", lambda one: True), ("alike", lambda one: one["peak_unlike"] is None))
    }
    return {
        "benchmark": "published",
        "scaled_down": [{"row": list(row), "constant": constant} for row, constant in FITTED.items()],
        "rows": found,
        "median_time_error": time,
        "median_peak_error": {name: _median_error(ratios) for name, ratios in peaks.items() if ratios},
        "orders": orders(found),
    }


def orders(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pairs of methods on the same model, length and devices that differ noticeably: how many come in their order."""
    wrong, count = [], 0
    for slow, fast in itertools.permutations(found, 2):
        alike = all(slow[name] == fast[name] for name in ("system", "model", "gpus", "seq_len"))
        if alike and fast["speed"] > NOTEWORTHY * slow["speed"]:
            count += 1
            # Ratios are of times: a speed is predicted as the published one over it.
            if fast["speed"] / fast["time_ratio"] <= slow["speed"] / slow["time_ratio"]:
                wrong.append(f"{fast['model']} {fast['seq_len']}: {fast['method']} before {slow['method']}")
    return {"pairs": count, "right": count - len(wrong), "wrong": wrong}


def _median_error(ratios: Sequence[float]) -> float:
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def _line(row: dict[str, Any]) -> str:
    peak = f"{row['peak_ratio']:.2f}" if row["peak_ratio"] else ""
    mark = "scaled_down" if row["scaled_down"] else row["peak_unlike"] or "" if peak else ""
    place = f"{row['model']} | {row['seq_len']:,} | {row['gpus']} {row['hardware'].removeprefix('8x')}"
    return f"| {place} | {row['method']} | {row['time_ratio']:.2f} | {peak} | {mark} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table and what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--no-memory", action="store_true", help="time alone, which takes seconds")
    args = parser.parse_args(argv)
    print("| model | tokens | devices | method | time | peak | |\n" + "|---" * 7 + "|")
    document = compare(published_rows(), None if args.no_memory else shared_predictor().predict)
    for name in ("median_time_error", "median_peak_error"):
        print(f"{name}: " + ", ".join(f"{of} {error:.1%}" for of, error in document[name].items()))
    print(f"orders: {json.dumps(document['orders'])}")
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
