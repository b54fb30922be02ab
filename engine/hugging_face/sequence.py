"""What one forward pass of a decoder of transformers hands to its layers, as the keyword argument `sequence`.

It travels with the call through transformers' code to `engine.attention.hugging_face.attention_forward`, so no module
holds state of a pass, and any number of passes may be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.attention.context import LinearLayer
from engine.attention.hugging_face import ModelSequence
from engine.attention.linear.sequence import LinearSequence
from engine.attention.runtime import AttentionRuntime, SavedResults, record_attention, run_attention
from engine.hugging_face.experts import RouterStatistics
from engine.model.decoder import AttentionFn


class LayerSequence(ModelSequence):
    """Attention of every layer of one forward pass.

    Attributes:
        functions: One per layer.
        windows: Sliding window of every layer in tokens by the model's config; None: none.
        position_ids: Of the local rows in their documents, [1, T] int64.
        routing: Collects what the routers chose; None: the model has none, or nobody wants to know.
    """

    def __init__(
        self,
        functions: Sequence[AttentionFn],
        windows: tuple[int | None, ...],
        position_ids: Tensor,
        routing: RouterStatistics | None = None,
    ) -> None:
        self.functions, self.windows, self.position_ids, self.routing = functions, windows, position_ids, routing

    @property
    def linear(self) -> LinearSequence:
        """The sequences for linear layers. Raises ValueError if no layer of the run is one."""
        found = next((function.linear for function in self.functions if isinstance(function, LinearLayer)), None)
        if found is None:
            raise ValueError("attention.mask_layers says no_attention for no layer, but the model has linear layers")
        return found

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Return out [B, T, H, v_dim] of layer number `layer`; see `ModelSequence.attend`."""
        function = self.functions[layer]
        return function(q, k, v) if sinks is None else run_attention(q, k, v, runtime_of(function), sinks)

    def latent_capture(self, layer: int) -> None:
        """Return None: keys and values of a run travel expanded."""

    def recorded(self) -> RecordedSequence:
        """Return this sequence, whose attention computes no graph and records results."""
        return RecordedSequence(self)

    def replayed(self, results: Sequence[SavedResults]) -> ReplayedSequence:
        """Return this sequence, whose attention takes `results` in the order in which they were recorded."""
        return ReplayedSequence(self, results)


class RecordedSequence(LayerSequence):
    """A `LayerSequence` that saves attention's results; results: those of the calls so far."""

    def __init__(self, of: LayerSequence) -> None:
        super().__init__(of.functions, of.windows, of.position_ids, of.routing)
        self.results: list[SavedResults] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Return out, without a graph."""
        out, results = record_attention(q, k, v, runtime_of(self.functions[layer]), sinks)
        self.results.append(results)
        return out


class ReplayedSequence(LayerSequence):
    """A `LayerSequence` whose attention is not computed again where its results are given."""

    def __init__(self, of: LayerSequence, results: Sequence[SavedResults]) -> None:
        super().__init__(of.functions, of.windows, of.position_ids, of.routing)
        self._results = list(reversed(results))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Return out of the results recorded, with a graph to q, k and v."""
        return run_attention(q, k, v, runtime_of(self.functions[layer]), sinks, self._results.pop())


def runtime_of(function: Any) -> AttentionRuntime:
    """Return the plans of an attention function."""
    runtime: AttentionRuntime = function.runtime
    return runtime
