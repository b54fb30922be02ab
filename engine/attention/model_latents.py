"""Latents of a transformers model: which linear layer expands them to keys and values, and its input in every call.

A model's attention expands k and v itself before it calls ours (DeepSeek's `kv_b_proj`). That a linear layer does so,
and nothing else, is proven when the model is enabled and not read from names: in a small forward pass its output is
replaced by random numbers, and these must be what arrives as v and as all channels of k but the last ones, which must
be the same in all heads; nothing else of the model's output may depend on them. What is not proven stays expanded.

From then on a hook hands the layer's input on to our attention, in calls whose latents travel. The model's own k and v
then serve for the channels with the position alone, and take no part in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.context import HeadShape
from engine.attention.model_calls import AttentionCall, AttentionProbe
from engine.planning.program.ops import LatentShape

PROBE_SHAPE = (2, 3)  # sequences and tokens: unequal, so that no axis is taken for another


class LatentCapture:
    """The input of one layer's expansion, from the moment it is computed until the same call's attention takes it.

    layer       number of the attention layer
    name        of the linear layer `expansion` in the attention module
    shape       of what it expands
    """

    def __init__(self, layer: int, name: str, expansion: nn.Linear, shape: LatentShape) -> None:
        self.layer, self.name, self.expansion, self.shape = layer, name, expansion, shape
        self._input: Tensor | None = None
        self._is_wanted = False

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the attention module: whether this call's latents travel."""
        capture_of = getattr(kwargs.get("sequence"), "latent_capture", None)
        self._input, self._is_wanted = None, capture_of is not None and capture_of(self.layer) is self

    def hold(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Forward hook of the expansion: hold its input; the output takes no part in backward."""
        if not self._is_wanted:
            return None
        self._input = args[0]
        return output.detach()

    def take(self, module: nn.Module, batch: int) -> Tensor:
        """c [B, T, rank] of the call that runs. ValueError if the model is not as it was when it was enabled."""
        latents, self._input = self._input, None
        if latents is None or getattr(module, self.name, None) is not self.expansion or not _is_plain(self.expansion):
            raise ValueError(
                f"{type(module).__name__}, layer {self.layer}: {self.name} is not the linear layer that it was when "
                "the model was enabled (an adapter, a quantised or sharded layer in its place?): call "
                "enable_context_parallel after such changes, or ContextParallel(kv_form='expanded')"
            )
        return latents.reshape(batch, -1, self.shape.rank)

    def install(self, module: nn.Module) -> None:
        """Add the hooks."""
        module.register_forward_pre_hook(self.begin, with_kwargs=True)
        self.expansion.register_forward_hook(self.hold)


@dataclass
class _Candidate:
    """A linear layer of an attention module that may be its expansion; `output`: random numbers in place of its own."""

    capture: LatentCapture
    heads: HeadShape
    output: Tensor | None = None
    inputs: int = 0  # numbers that it read
    outputs: list[Tensor] = field(default_factory=list)
    is_proven: bool = False
    is_refuted: bool = False

    def replace_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Forward hook of the linear layer."""
        self.output = torch.randn_like(output).requires_grad_()
        self.outputs.append(self.output)
        self.inputs = args[0].numel()
        return self.output

    def judge(self, key: Tensor, value: Tensor) -> None:
        """Compare key [B, K, T, head_dim] and value [B, K, T, v_dim] of a call with the random numbers."""
        batch, heads, rows, _ = key.shape
        nope, rank = self.heads.head_dim - self.capture.shape.rope_dim, self.capture.shape.rank
        output, self.output = self.output, None
        fits = output is not None and self.inputs == batch * rows * rank
        if output is not None and fits:
            expanded = output.reshape(batch, rows, heads, -1).transpose(1, 2)
            rope = key[..., nope:]
            fits = torch.equal(key[..., :nope], expanded[..., :nope]) and torch.equal(value, expanded[..., nope:])
            fits = fits and torch.equal(rope, rope[:, :1].expand_as(rope))
        self.is_proven, self.is_refuted = fits, self.is_refuted or not fits


class LatentProbe(AttentionProbe):
    """The `sequence` of the forward pass that proves expansions."""

    def __init__(self, candidates: Mapping[nn.Module, Sequence[_Candidate]]) -> None:
        super().__init__()
        self._candidates = candidates

    def record(self, module: nn.Module, call: AttentionCall, operands: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Judge the candidates of a module; zeros, as of `AttentionProbe`."""
        for candidate in self._candidates.get(module, ()):
            candidate.judge(*operands[1:])
        return super().record(module, call, operands)


def find_latents(
    model: nn.Module, calls: Sequence[AttentionCall], run: Callable[[tuple[int, int], AttentionProbe], Any]
) -> dict[int, tuple[nn.Module, LatentCapture]]:
    """By layer: the attention modules whose keys and values are proven to be expanded from latents, and by what.

    Args:
        model: Under our attention implementation; not changed.
        calls: That it makes of its attention.
        run: Runs the model on (sequences, tokens) with a probe; returns its output, logits first.
    """
    heads = {call.layer: call.heads for call in calls}
    candidates = {module: several for module in model.modules() if (several := [*_candidates(module, heads)])}
    everything = [each for several in candidates.values() for each in several]
    if not everything or next(model.parameters()).device.type == "meta":  # nothing to compare without numbers
        return {}
    with contextlib.ExitStack() as hooks, torch.enable_grad():
        for each in everything:
            handle = each.capture.expansion.register_forward_hook(each.replace_output)
            hooks.callback(handle.remove)
        logits = run(PROBE_SHAPE, LatentProbe(candidates))[0]
    if logits.requires_grad:
        outputs = [(each, output) for each in everything for output in each.outputs]
        gradients = torch.autograd.grad(logits.sum(), [output for _, output in outputs], allow_unused=True)
        for (each, _), gradient in zip(outputs, gradients, strict=True):
            each.is_refuted |= gradient is not None
    return {
        each.capture.layer: (module, each.capture)
        for module, several in candidates.items()
        for each in several
        if each.is_proven and not each.is_refuted
    }


def install_captures(layers: Mapping[int, tuple[nn.Module, LatentCapture]]) -> dict[int, LatentCapture]:
    """The captures by layer, hooked; those of a model that was enabled before serve again."""
    captures = {}
    for layer, (module, capture) in layers.items():
        owners = [getattr(hook, "__self__", None) for hook in capture.expansion._forward_hooks.values()]
        earlier = next((owner for owner in owners if isinstance(owner, LatentCapture)), None)
        if earlier is None:
            capture.install(module)
        captures[layer] = earlier or capture
    return captures


def with_latents(
    calls: Sequence[AttentionCall], layers: Mapping[int, tuple[nn.Module, LatentCapture]]
) -> list[AttentionCall]:
    """The calls, whose heads say what their keys and values are expanded from."""
    return [
        call._replace(heads=replace(call.heads, latent=layers[call.layer][1].shape)) if call.layer in layers else call
        for call in calls
    ]


def _is_plain(part: nn.Module) -> bool:
    """Whether a module computes x W^T + b and no more: not an adapter, a quantised or a parametrised layer."""
    return type(part) is nn.Linear


def _candidates(module: nn.Module, heads: Mapping[int, HeadShape]) -> Iterator[_Candidate]:
    """Linear layers of an attention module whose widths would do: k and v are wider than what they are made of."""
    shape = heads.get(getattr(module, "layer_idx", -1))
    for name, part in module.named_children() if shape else ():
        if shape is None or not isinstance(part, nn.Linear) or not _is_plain(part):
            continue
        nope, rest = part.out_features // shape.num_kv_heads - shape.v_dim, part.out_features % shape.num_kv_heads
        latent = LatentShape(part.in_features, shape.head_dim - nope)
        is_smaller = latent.dim < shape.num_kv_heads * (shape.head_dim + shape.v_dim)
        if rest == 0 and 0 < nope <= shape.head_dim and is_smaller:
            yield _Candidate(LatentCapture(int(module.layer_idx), name, part, latent), shape)  # type: ignore[arg-type]
