"""Updates on the host beside backward: the same bits, really beside it, within bounds, and no error is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit.ranks import Pools
from testkit.tiny_training import (
    TINY_MODEL,
    TinyRun,
    accumulated,
    full_weights,
    own_part,
    random_batches,
    start_run,
    tiny_config,
)
from torch import Tensor

from engine.config.settings import RunConfig
from engine.distributed.collectives import reduce_scatter_into
from engine.optim.updates import UNITS_AHEAD, HostGradients, HostUpdates, Staged, worker_thread
from engine.parallel.fsdp import fsdp_modules

STEPS, MICRO_STEPS, SEQUENCES = 2, 2, 4
LAYERS = 6
WAIT_S = 30.0
LATE = {"learning_rate": 3e-3, "schedule": "constant", "max_grad_norm": 0.1}
IN_BACKWARD = {"optimizer": LATE | {"max_grad_norm": None}, "memory": {"optimizer_in_backward": True}}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "clipped, accumulated": ({"optimizer": LATE, "train": {"grad_accum_steps": MICRO_STEPS}}, MICRO_STEPS),
    "in backward": (IN_BACKWARD, 1),
}


def on_host(changes: dict[str, Any]) -> RunConfig:
    config = tiny_config(**{"parallel": {"dp_shard_size": 2}, "attention": {"preset": "single"}} | changes)
    return replace(config, memory=replace(config.memory, optimizer_store="host"))


class LateCopies:
    """A reduce-scatter of FSDP2 whose results are NaN until somebody has waited for the event of their copy."""

    def __init__(self) -> None:
        self._flying: list[tuple[Tensor, Tensor]] = []
        self.waited = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        work = reduce_scatter_into(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        self._flying.append((output_tensor, output_tensor.clone()))
        output_tensor.fill_(torch.nan)
        return work

    def arrival(self) -> LateCopies.Event:
        flying, self._flying = self._flying, []
        return LateCopies.Event(self, flying)

    class Event:
        def __init__(self, copies: LateCopies, flying: list[tuple[Tensor, Tensor]]) -> None:
            self._copies, self._flying = copies, flying

        def synchronize(self) -> None:
            assert threading.current_thread() is not threading.main_thread()
            self._copies.waited += 1
            for target, values in self._flying:
                target.copy_(values)


def accumulate(run: TinyRun, step: int, micro_steps: int = 1) -> None:
    accumulated(run, own_part(random_batches(step, sequences=SEQUENCES), run.mesh, micro_steps=micro_steps))


def beside(run: TinyRun, copies: LateCopies) -> HostUpdates:
    """Updates by a thread, from gradients that come late."""
    config = run.train_step.config
    owner = run.model, run.train_step.optimizer, config.optimizer.max_grad_norm
    for unit in fsdp_modules(run.model):
        unit.set_custom_reduce_scatter(copies)  # type: ignore[arg-type]
    in_backward = config.memory.optimizer_in_backward
    return HostUpdates(*owner, worker_thread(), copies.arrival, in_backward=in_backward)


def weights_after(config: RunConfig, micro_steps: int, late: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """(norms, weights, arrivals that were waited for) of STEPS steps."""
    run, copies = start_run(config), LateCopies()
    updates = beside(run, copies) if late else run.train_step
    norms = []
    for step in range(STEPS):
        accumulate(run, step, micro_steps)
        norms.append(float(updates.finish() if isinstance(updates, HostUpdates) else updates.update()))
    updates.wait_pending()
    return norms, full_weights(run.model), copies.waited


@pytest.mark.parametrize("case", CASES)
def test_a_thread_that_waits_for_every_copy_leaves_the_same_bits_as_updates_one_after_the_other(
    ranks: Pools, case: str
) -> None:
    changes, micro_steps = CASES[case]
    config = on_host(changes)
    on_device = replace(config, memory=replace(config.memory, optimizer_store="device", optimizer_in_backward=False))
    for serial, late in zip(
        ranks(2).run(weights_after, on_device, micro_steps, False),
        ranks(2).run(weights_after, config, micro_steps, True),
        strict=True,
    ):
        assert late[0] == pytest.approx(serial[0], rel=1e-6)  # squares summed in another order
        assert all(torch.equal(late[1][name], weight) for name, weight in serial[1].items())
        assert late[2] >= STEPS * micro_steps * (TINY_MODEL.num_layers + 2)  # every unit of every backward pass


def deep_run() -> TinyRun:
    changes = {"model": replace(TINY_MODEL, num_layers=LAYERS), "parallel": {"dp_shard_size": 1}}
    return start_run(on_host(IN_BACKWARD | changes))


def what_happened() -> list[str]:
    """In order: backward of layers, and the first use of a gradient, which lasts until the last layer's backward."""
    run, events, begun, went_on = deep_run(), [], threading.Event(), threading.Event()

    def use(staged: Staged) -> None:
        if "use begins" not in events:
            events.append("use begins")
            begun.set()
            assert went_on.wait(WAIT_S), "backward stood still"
            events.append("use ends")

    def came(layer: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if layer == LAYERS - UNITS_AHEAD:  # a thread that was asked to use it may begin later
                assert begun.wait(WAIT_S), "no gradient was used"
            events.append(f"layer {layer}")
            if layer == LAYERS - UNITS_AHEAD:
                went_on.set()

        return hook

    for index, layer in enumerate(run.model.layers):
        layer.register_full_backward_pre_hook(came(index))
    gradients = HostGradients(run.model, use, worker_thread(), lambda: None)
    accumulate(run, 0)
    gradients.finish()
    return events


def test_backward_continues_while_a_gradient_is_used(ranks: Pools) -> None:
    events = ranks(1).run(what_happened)[0]
    assert events.index("use begins") < events.index(f"layer {LAYERS - UNITS_AHEAD}") < events.index("use ends")
    assert events.index(f"layer {LAYERS - 1}") < events.index("use begins")  # not before its own backward


def weights_of_lazy_updates() -> tuple[list[int], bool]:
    """(updates that wait before each layer of the next forward pass and at its end, whether these left the weights of
    updates at once), where an update runs when somebody waits for it."""
    changes = {"optimizer": LATE, "model": replace(TINY_MODEL, num_layers=LAYERS), "parallel": {"dp_shard_size": 1}}
    at_once, run, worker, left = start_run(on_host(changes)), start_run(on_host(changes)), Lazy(), list[int]()
    owner = run.model, run.train_step.optimizer, LATE["max_grad_norm"]
    updates = HostUpdates(*owner, worker.submit, lambda: None, in_backward=False)
    for layer in run.model.layers:
        layer.register_forward_pre_hook(lambda *_: left.append(len(worker.waiting)))
    for step in range(STEPS):
        accumulate(at_once, step)
        at_once.train_step.update()
        left.clear()
        accumulate(run, step)
        updates.finish()
    updates.wait_pending()
    pairs = zip(full_weights(at_once.model).values(), full_weights(run.model).values(), strict=True)
    return left, all(torch.equal(expected, found) for expected, found in pairs)


def test_forward_waits_only_for_updates_of_its_unit(ranks: Pools) -> None:
    left, is_equal = ranks(1).run(weights_of_lazy_updates)[0]
    assert left == [LAYERS - layer for layer in range(LAYERS)]  # those of the layers after it, and the head's
    assert is_equal


class Lazy:
    """A worker that runs nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.most = 0

    def submit(self, call: Callable[[], None]) -> Future[None]:
        self.waiting.append(call)
        self.most = max(self.most, len(self.waiting))
        lazy = self

        class Awaited(Future[None]):
            def result(self, timeout: float | None = None) -> None:
                if not self.done():
                    lazy.waiting.pop(0)()
                    self.set_result(None)

        return Awaited()


def most_that_waited() -> tuple[int, int]:
    """(gradients of units that waited at once at most, parameters that were used)."""
    run, worker, used = deep_run(), Lazy(), set()
    gradients = HostGradients(run.model, lambda staged: used.update(p for p, _ in staged), worker.submit, lambda: None)
    accumulate(run, 0)
    gradients.finish()
    return worker.most, len(used) - len(list(run.model.parameters()))


def test_backward_waits_for_a_slow_host(ranks: Pools) -> None:
    assert ranks(1).run(most_that_waited)[0] == (UNITS_AHEAD + 1, 0)


def words_of_failure() -> tuple[str, int]:
    """(what a step whose second use fails raises, uses that were begun), while a third one waits behind it."""
    run, uses, calls, third, submit = deep_run(), list[Staged](), list[Any](), threading.Event(), worker_thread()

    def counted(call: Callable[[], None]) -> Future[None]:
        calls.append(submit(call))
        if len(calls) == 3:
            third.set()
        return calls[-1]

    def use(staged: Staged) -> None:
        uses.append(staged)
        if len(uses) == 2:
            assert third.wait(WAIT_S)
            raise ArithmeticError("no memory for moments")

    gradients, words = HostGradients(run.model, use, counted, lambda: None), ""
    try:
        accumulate(run, 0)
        gradients.finish()
    except Exception as error:
        words = str(error)
    submit(lambda: None).result(WAIT_S)  # all calls before it are over
    return words, len(uses)


def test_what_fails_beside_backward_ends_the_step(ranks: Pools) -> None:
    words, uses = ranks(1).run(words_of_failure)[0]
    assert "no memory for moments" in words
    assert uses == 2


def hooks_on_gradients() -> int:
    parameters = start_run(on_host(IN_BACKWARD)).model.parameters()
    return sum(len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) for parameter in parameters)


def test_no_hook_hangs_on_a_gradient_since_torch_would_then_copy_it_through_pageable_memory(ranks: Pools) -> None:
    assert ranks(2).run(hooks_on_gradients) == [0, 0]
