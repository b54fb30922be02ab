"""Runs the code of a family once on the meta device, to find before any rank starts what it would do in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.hugging_face import ShardMask
from engine.config.settings import ModelConfig
from engine.hugging_face.sequence import LayerSequence

_ROWS = 4


class _RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class _ProbedSequence(LayerSequence):
    """Attention that computes nothing; calls: layers, and their q, k and v."""

    def __init__(self, windows: tuple[int | None, ...], position_ids: Tensor) -> None:
        super().__init__((), windows, position_ids)
        self.calls: list[tuple[int, tuple[Tensor, ...]]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Return memory of the shape of attention's out, which depends on q, k and v."""
        self.calls.append((layer, (q, k, v)))
        return (q.sum() + k.sum() + v.sum()).expand(*q.shape[:3], v.shape[3]) * 1.0


def probe_problems(base: nn.Module, windows: tuple[int | None, ...], config: ModelConfig) -> Iterator[str]:
    """Yield what a training step would meet: a refused argument of attention, random numbers, layers without attention.

    Args:
        base: A decoder of transformers on the meta device, in training mode, whose attention is ours.
        windows: Sliding window of every layer.
        config: Shape of the heads.
    """
    tokens = torch.zeros(1, _ROWS, dtype=torch.int64, device="meta")
    positions = torch.arange(_ROWS, device="meta")[None]
    sequence = _ProbedSequence(windows, positions)
    weights = {name: parameter.to(torch.bfloat16) for name, parameter in base.named_parameters()}
    mask = torch.ones(1, _ROWS, dtype=torch.bool, device="meta").as_subclass(ShardMask)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": False, "sequence": sequence}
    try:
        with _RandomOperations() as random:
            functional_call(base, weights, (), {"input_ids": tokens, **arguments})
    except NotImplementedError as error:  # an operation that depends on values, which meta tensors do not have
        yield f"its code cannot be run without values: {error}"
        return
    except Exception as error:
        yield f"its code cannot be run as a part of a training step: {error}"
        return
    yield from _call_problems(sequence.calls, config)
    if random.names:
        yield (
            f"it draws random numbers in training ({', '.join(sorted(random.names))}), which could not be repeated in "
            "backward; set its dropouts and jitter to 0 in model.hf_config"
        )


def _call_problems(calls: Sequence[tuple[int, tuple[Tensor, ...]]], config: ModelConfig) -> Iterator[str]:
    """Yield which layers do not call attention once, in order, with the heads of the settings, in one dtype."""
    numbers = [layer for layer, _ in calls]
    if numbers != list(range(config.num_layers)):
        yield f"its attention is called by layers {numbers}, expected each of {config.num_layers} once, in order"
    others = sorted({str(x.dtype) for _, tensors in calls for x in tensors} - {"torch.bfloat16"})
    if others:
        yield f"its attention gets {', '.join(others)} where the weights are bfloat16, and kernels take one dtype"
    v_dim = config.v_head_dim or config.head_dim
    expected = (
        (config.num_heads, config.head_dim),
        (config.num_kv_heads, config.head_dim),
        (config.num_kv_heads, v_dim),
    )
    for layer, tensors in calls:
        found = tuple(tuple(x.shape[2:]) for x in tensors)
        if found != expected:
            yield (
                f"attention of layer {layer} gets q, k, v with (heads, width) {found}, but by the settings of model "
                f"{expected}"
            )
            return
