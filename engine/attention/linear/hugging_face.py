"""Linear layers of transformers' models: the functions of the model's module that mix rows run over all ranks.

Layers of these families call a chunk rule and a short convolution, found as globals of their modelling module, with the
keyword arguments of the model. The functions in their place act where `sequence` is among these, and else call the ones
that were there: models of the same family that are not enabled stay as they are. Its attribute `linear` is that of a
context, or None in a call that records what a model asks of its attention; then linear layers are not computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.linear.convolution import causal_conv1d
from engine.attention.linear.delta_rule import gated_delta_rule
from engine.attention.linear.rule import DeltaInputs
from engine.attention.linear.sequence import LinearSequence
from engine.config.settings import LayoutName


class LinearFamily(NamedTuple):
    """How a family's linear layers are found, and what they call.

    layer_type   in the config's layer_types
    mixer        class of the module that mixes rows, without the name of the family
    chunk_rule   function of the gated delta rule; None: the layers have a convolution alone
    """

    layer_type: str
    mixer: str
    chunk_rule: str | None


_CONVOLUTION, _RECURRENT_MASK = "causal_conv1d_fn", "create_recurrent_attention_mask"
_SHORT_CONVOLUTION = LinearFamily("conv", "ShortConv", None)
_GATED_DELTA_NET = LinearFamily("linear_attention", "GatedDeltaNet", "torch_chunk_gated_delta_rule")
_KIMI = LinearFamily("linear_attention", "DeltaAttention", "chunk_kimi_delta_attention")
FAMILIES: Mapping[str, LinearFamily] = {  # by model_type
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _SHORT_CONVOLUTION),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _GATED_DELTA_NET),
    "kimi_linear": _KIMI,
}


class LinearLayers:
    """The linear layers of one model, of a family that is understood; `find_linear_layers` makes it."""

    def __init__(self, model: Any, family: LinearFamily) -> None:
        self.family, self._config = family, model.config
        self._module = sys.modules[type(model).__module__]
        self.mixers = [part for part in model.modules() if type(part).__name__.endswith(family.mixer)]

    @property
    def layers(self) -> set[int]:
        """Indexes of the linear layers in the model."""
        return {index for index, kind in enumerate(self._config.layer_types) if kind == self.family.layer_type}

    @property
    def parts(self) -> set[nn.Module]:
        """All modules inside the mixers, such as their convolutions."""
        return {part for mixer in self.mixers for part in mixer.modules()}

    def problems(self, layout: LayoutName) -> Iterator[str]:
        """One sentence for all that keeps the layers from running over ranks that hold the rows of a layout."""
        for name in self._functions():
            if not callable(getattr(self._module, name, None)):
                yield f"its {self.family.layer_type} layers call no {name} in this version of transformers"
        if layout == "striped":
            yield (
                f"its {self.family.layer_type} layers need runs of consecutive positions on a rank, which layout "
                "striped does not have; choose zigzag, contiguous, chunk_cyclic, per_document or balanced"
            )

    def replace_functions(self, mask_type: type[Tensor]) -> None:
        """Have the functions of the model's module run over all ranks wherever they get the sequence of a rank.

        `mask_type`: of an attention_mask that hides nothing and must not be read.
        """
        replacements: dict[str, Any] = {_CONVOLUTION: _Convolution, _RECURRENT_MASK: _RecurrentMask}
        if self.family.chunk_rule is not None:
            replacements[self.family.chunk_rule] = _ChunkRule
        for name, replacement in replacements.items():
            stock = getattr(self._module, name, None)
            if stock is not None and not isinstance(stock, _Replacement):
                setattr(self._module, name, replacement(stock, self._module, mask_type))

    def add_checks(self, implementation: str) -> None:
        """Have every call of the model checked: that it has a sequence, and that its layers run over all ranks.

        `implementation`: of attention in the model's config, as long as the model is enabled.
        """
        calls = 1 if self.family.chunk_rule is None else 2
        for mixer in self.mixers:
            if not any(isinstance(hook, _BeforeMixer) for hook in mixer._forward_pre_hooks.values()):
                before = _BeforeMixer(self._config, implementation)
                mixer.register_forward_pre_hook(before, with_kwargs=True)
                mixer.register_forward_hook(_AfterMixer(before, calls), with_kwargs=True)

    def _functions(self) -> list[str]:
        return [name for name in (_CONVOLUTION, _RECURRENT_MASK, self.family.chunk_rule) if name is not None]


def find_linear_layers(model: Any) -> LinearLayers | None:
    """Return the linear layers of a model; None if it has none, or its family is not understood."""
    config = model.config
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None or family.layer_type not in (getattr(config, "layer_types", None) or ()):
        return None
    return LinearLayers(model, family)


class _Replacement:
    """A function in the place of `stock`, of the modelling module `module`."""

    def __init__(self, stock: Callable[..., Any], module: Any, mask_type: type[Tensor]) -> None:
        self.stock, self.module, self.mask_type = stock, module, mask_type


class _Convolution(_Replacement):
    """In place of causal_conv1d_fn."""

    def __call__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        sequence: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return [B, channels, T] of hidden_states [B, channels, T]."""
        if sequence is None:
            result: Tensor = self.stock(hidden_states, weight, bias, activation=activation, **options)
            return result
        linear: LinearSequence | None = sequence.linear
        if linear is None:
            return torch.zeros_like(hidden_states)
        _check_options("causal_conv1d_fn", options, ("seq_idx", "cu_seqlens", "initial_states"))
        out = causal_conv1d(hidden_states, weight, bias, linear)
        return out if activation is None else self.module.ACT2FN[activation](out)


class _ChunkRule(_Replacement):
    """In place of a family's chunk rule."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        sequence: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out [B, T, H, dv], no final state)."""
        if sequence is None:
            options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            result: tuple[Tensor, Tensor | None] = self.stock(query, key, value, g=g, beta=beta, **options)
            return result
        linear: LinearSequence | None = sequence.linear
        if linear is None:
            return torch.zeros_like(value), None
        _check_options("the chunk rule", options, ("cu_seqlens", "initial_state", "output_final_state"))
        inputs = DeltaInputs(query, key, value, g, beta, use_qk_l2norm_in_kernel)
        return gated_delta_rule(inputs, linear), None


class _RecurrentMask(_Replacement):
    """In place of create_recurrent_attention_mask, which looks into every mask."""

    def __call__(self, config: Any, inputs_embeds: Tensor, attention_mask: Any, **options: Any) -> Any:
        """Return no mask for one that hides nothing."""
        if isinstance(attention_mask, self.mask_type):
            return None
        return self.stock(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **options)


class _BeforeMixer:
    """Forward pre-hook of a mixer: notes how many calls over all ranks there were."""

    def __init__(self, config: Any, implementation: str) -> None:
        self._config, self._implementation = config, implementation
        self.calls = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError when an enabled model is called without a sequence."""
        sequence = kwargs.get("sequence")
        if sequence is not None:
            self.calls = 0 if sequence.linear is None else sequence.linear.calls
        elif self._config._attn_implementation == self._implementation:
            raise ValueError(
                f"{type(module).__name__} runs under context parallelism, but its model was called without the "
                "arguments that InputSharder.shard_inputs returns, or does not pass `sequence` on to its layers"
            )


class _AfterMixer:
    """Forward hook of a mixer: ValueError unless its functions ran over all ranks."""

    def __init__(self, before: _BeforeMixer, calls: int) -> None:
        self._before, self._calls = before, calls

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Compare the calls since the pre-hook."""
        linear = None if kwargs.get("sequence") is None else kwargs["sequence"].linear
        if linear is not None and linear.calls != self._before.calls + self._calls:
            raise ValueError(
                f"{type(module).__name__} does not call {self._calls} functions with the `sequence` that it gets, so "
                "it would mix the rows of this rank alone; this version of transformers is not understood"
            )


def _check_options(function: str, options: Mapping[str, Any], unsupported: tuple[str, ...]) -> None:
    for name in unsupported:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{function}: got {name}, which linear attention over several ranks does not have")
