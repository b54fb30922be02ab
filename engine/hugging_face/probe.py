"""Runs the code of a family once on the meta device, to find before any rank starts what it would do in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.context import HeadShape
from engine.attention.hugging_face import ShardMask
from engine.attention.model_calls import AttentionCall, AttentionProbe, call_problems
from engine.config.settings import ModelConfig

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


class _Probe(AttentionProbe):
    """An `AttentionProbe` whose results depend on the queries; dtypes: of these."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def record(self, module: nn.Module, call: AttentionCall, operands: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Note the call and its dtype."""
        self.dtypes.add(operands[0].dtype)
        return super().record(module, call, operands)


def probe_problems(
    base: nn.Module, windows: tuple[int | None, ...], config: ModelConfig, linear_layers: Collection[int] = ()
) -> Iterator[str]:
    """Yield what a training step would meet: a refused argument of attention, random numbers, layers without attention.

    Args:
        base: A decoder of transformers on the meta device, in training mode, whose attention is ours.
        windows: Sliding window of every layer.
        config: Shape of the heads.
        linear_layers: Indexes of layers without attention.
    """
    tokens = torch.zeros(1, _ROWS, dtype=torch.int64, device="meta")
    positions = torch.arange(_ROWS, device="meta")[None]
    probe = _Probe()
    weights = {name: parameter.to(torch.bfloat16) for name, parameter in base.named_parameters()}
    mask = torch.ones(1, _ROWS, dtype=torch.bool, device="meta").as_subclass(ShardMask)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": False, "sequence": probe}
    try:
        with _RandomOperations() as random:
            functional_call(base, weights, (), {"input_ids": tokens, **arguments})
    except NotImplementedError as error:  # an operation that depends on values, which meta tensors do not have
        yield f"its code cannot be run without values: {error}"
        return
    except Exception as error:
        yield f"its code cannot be run as a part of a training step: {error}"
        return
    yield from call_problems(probe.calls, windows, linear_layers)
    yield from _head_problems(probe.calls, config)
    if probe.dtypes - {torch.bfloat16}:
        found = ", ".join(sorted(map(str, probe.dtypes)))
        yield f"its attention gets {found} where the weights are bfloat16, and kernels take one dtype"
    if random.names:
        yield (
            f"it draws random numbers in training ({', '.join(sorted(random.names))}), which could not be repeated in "
            "backward; set its dropouts and jitter to 0 in model.hf_config"
        )


def _head_problems(calls: Sequence[AttentionCall], config: ModelConfig) -> Iterator[str]:
    """Yield the first layer whose heads are not those of the settings."""
    expected = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, config.v_head_dim or config.head_dim)
    for call in calls:
        if call.heads != expected:
            yield f"attention of layer {call.layer} has {call.heads}, but by the settings of model {expected}"
            return
