"""A machine of known rates is measured to have them: seconds are counted from what calls do, not from a clock.

And what the clock says of calls of known length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.ranks import Pools
from testkit.resolved import step_of
from torch.utils._python_dispatch import TorchDispatchMode

from engine.bench import machine
from engine.bench.machine import measure_machine
from engine.bench.measure import Stopwatch
from engine.bench.spec import HeadShape, MachineCell, RankSetup
from engine.planning.topology import Topology
from engine.predict.flops import count_parameters
from engine.predict.machine import Machine
from engine.predict.memory import find_hardware
from engine.predict.plan_costs import layer_numbers
from engine.predict.step_time import UPDATE_BYTES

SHAPE = HeadShape(2, 2, 16, "float32")
MATMUL, FORWARD, BACKWARD, BLOCK_ROWS = 1e9, 2e9, 1e9, 96
LATENCY_S, INTRA, INTER, SHARE = 1e-3, 1e8, 2e7, 0.25
COPY_S, COPY, ROW_S, UPDATE_S, STEP_S, LAYER_S = 1e-4, 1e9, 1e-3, 0.5, 30.0, 2.0


class Work(TorchDispatchMode):
    """What a call does: its products and attention in seconds, bytes that it sends and copies, and which operators."""

    def __init__(self) -> None:
        super().__init__()
        self.product_s = self.attention_s = 0.0
        self.sent: dict[int, int] = {}  # by peer
        self.copied, self.rows, self.products, self.tiles, self.tokens = 0, 0, 0, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("aten.mm"):
            (rows, inner), outputs = args[0].shape, args[1].shape[1]
            self.rows, self.products = self.rows or rows, self.products + 1
            rate = MATMUL if min(inner, outputs) >= 128 else MATMUL / 2
            self.product_s += 2 * rows * inner * outputs / rate
        elif "flash_attention_for_cpu" in name:
            backward = "backward" in name
            self.tiles += backward
            _, heads, rows, width = args[backward].shape
            causal = any(value is True for value in args)
            pairs = rows * (rows + BLOCK_ROWS) / 2 if causal else rows * rows
            self.attention_s += heads * width * pairs * (10 / BACKWARD if backward else 4 / FORWARD)
        elif name.startswith("c10d.send"):
            self.sent[args[2]] = sum(tensor.nbytes for tensor in args[0])
        elif name.startswith("aten.copy_") and args[0].dtype == torch.uint8:
            self.copied += args[0].nbytes
        elif name.startswith("aten.embedding."):
            self.tokens += args[1].numel()  # of a step
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted(Stopwatch):
    """Seconds of a machine of these rates, on which ranks of a node share one link to others."""

    setup: RankSetup

    def seconds(self, call: Callable[[], object]) -> float:
        """Collective, as that of a clock."""
        with Work() as work:
            call()
        message_s = self._message_s(work.sent)
        if work.tokens:
            layers = work.tiles / dist.get_world_size()  # of a layer one for every rank's keys
            return STEP_S * work.tokens / 64 + LAYER_S * layers**2  # not even, so that it matters which are measured
        if work.products > 3:  # more than one matrix has
            return work.product_s + ROW_S * work.rows
        if work.product_s or work.attention_s:
            return work.product_s + work.attention_s + SHARE * message_s
        if work.copied:
            return COPY_S + work.copied / COPY
        return message_s or UPDATE_S

    def _message_s(self, sent: dict[int, int]) -> float:
        nodes, local_ranks = self.setup.nodes, self.setup.local_ranks
        here = dist.get_rank() // local_ranks
        found = torch.zeros(nodes + 1, dtype=torch.float64)
        for peer, size in sent.items():
            inside = peer // local_ranks == here
            found[nodes if inside else here] += size / (INTRA * nodes * local_ranks if inside else INTER)
        dist.all_reduce(found)  # a node's messages to others take turns
        seconds = float(found.max())
        return LATENCY_S + seconds if seconds else 0.0


def measured(cell: MachineCell) -> tuple[Machine, dict[str, Any]]:
    return measure_machine(cell, Counted(torch.device("cpu"), cell.window_s, cell.setup))


def overheads(cell: MachineCell, machine: Machine) -> tuple[float, float]:
    """(per layer, per step) of steps of one and of five layers, beyond what is predicted."""
    world = Topology(cell.setup.nodes, cell.setup.local_ranks)
    plain = replace(machine, layer_overhead_s=0.0, step_overhead_s=0.0)
    one, five = (
        STEP_S + layers**2 * LAYER_S - step_of(cell.run_config(layers), world, plain).seconds for layers in (1, 5)
    )
    return (five - one) / 4, one - (five - one) / 4


@pytest.mark.parametrize("setup", [RankSetup(4, 2), RankSetup(1)], ids=["2 nodes of 2", "alone"])
def test_a_machine_of_known_rates_is_measured_to_have_them(ranks: Pools, setup: RankSetup) -> None:
    cell, is_alone = MachineCell(setup, SHAPE, window_s=0.02), setup.ranks == 1
    found, series = ranks(setup.ranks).run(measured, cell)[0]
    rate = 3 * layer_numbers(cell.model(256, 1)) * 4 / ROW_S
    update = UPDATE_BYTES * count_parameters(cell.run_config(2, 512).model).total / setup.ranks / UPDATE_S
    layer_s, step_s = overheads(cell, found)
    expected = Machine(
        name="measured",
        forward_flops_per_s=FORWARD,
        backward_flops_per_s=BACKWARD,
        matmul_flops_per_s=MATMUL,
        kernel_block_rows=BLOCK_ROWS,
        tile_overhead_s=0.0,
        elementwise_bytes_per_s=rate,
        update_bytes_per_s=update,
        intra_bytes_per_s=1e10 if is_alone else INTRA,
        intra_latency_s=1e-6 if is_alone else LATENCY_S,
        inter_bytes_per_s=1e10 if is_alone else INTER,
        inter_latency_s=1e-6 if is_alone else LATENCY_S,
        shared_nic=not is_alone,
        message_compute_share=0.0 if is_alone else SHARE,
        host_bytes_per_s=COPY,
        host_latency_s=COPY_S,
        is_cpu=True,
        local_ranks=setup.local_ranks,
        layer_overhead_s=layer_s,
        step_overhead_s=step_s,
        host_memory_bytes=find_hardware().host_bytes,
        source=f"burst bench machine, {setup.ranks} ranks on {setup.nodes} nodes",
    )
    figures = {name: value for name, value in vars(expected).items() if not name.endswith("_shares")}
    assert {name: getattr(found, name) for name in figures} == pytest.approx(figures)
    shares = ((32.0, 0.5), (64.0, 0.5), (128.0, 1.0), (256.0, 1.0))
    assert [n for point in found.matmul_shares for n in point] == pytest.approx([n for point in shares for n in point])
    layer_bytes = 128 * 256 * 4
    assert [n for point in found.elementwise_shares for n in point] == pytest.approx([layer_bytes, 1.0])
    tiles, messages = [64, 128, 256, 512, 1024], [] if is_alone else [1 << bits for bits in (12, 16, 18, 20, 22)]
    assert {name: [size for size, _ in points] for name, points in series.items()} == {
        "product_flops_per_s": [size for size, _ in shares],
        "forward_flops_per_s": tiles,
        "backward_flops_per_s": tiles,
        "elementwise_bytes_per_s": [layer_bytes],
        "intra_message_s": messages,
        "inter_message_s": messages,
    }
    for name in ("forward", "backward"):
        largest = max(rate for _, rate in series[f"{name}_flops_per_s"])
        flat = [n for size, share in getattr(found, f"{name}_shares") for n in (size, share * largest)]
        assert flat == pytest.approx([n for point in series[f"{name}_flops_per_s"] for n in point])


def test_every_size_is_set_per_device_type() -> None:
    tables = [table for name, table in vars(machine).items() if name.isupper() and isinstance(table, dict)]
    for table in tables:
        assert table.keys() == {"cpu", "cuda"}
        for sizes in ([one] if isinstance(one, int) else one for one in table.values()):
            assert [0, *sorted(set(sizes))] == [0, *sizes]
            assert sizes[0] > 0


def timed(window_s: float, call_s: float) -> tuple[list[float], int]:
    """(seconds by rank, how often it was called here) of a call that is long on rank 1."""
    calls = []

    def call() -> None:
        calls.append(dist.get_rank())
        time.sleep(call_s * dist.get_rank())

    return Stopwatch(torch.device("cpu"), window_s).by_rank(call), len(calls)


@pytest.mark.parametrize(
    ("window_s", "call_s", "repeats"), [(0.05, 0.1, [1]), (0.01, 0.11, []), (0.5, 0.03, range(2, 17))]
)
def test_short_calls_are_repeated_until_a_window_is_full(
    ranks: Pools, window_s: float, call_s: float, repeats: Sequence[int]
) -> None:
    """Three windows after the first call and the one that tells how often."""
    for seconds, calls in ranks(2).run(timed, window_s, call_s):
        assert seconds[0] < call_s <= seconds[1] < 10 * call_s
        assert calls in [2 + 3 * times for times in repeats or [0]]
