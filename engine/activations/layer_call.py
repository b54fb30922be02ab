"""One call of a layer: what runs in its forward pass, what is kept of it, and the four parts of its backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.activations.store import ActivationStore
from engine.attention.executor import Execution
from engine.attention.merge import backward_stats
from engine.attention.runtime import AttentionRuntime, KeptResults, SavedAttention
from engine.device.row_blocks import accumulate_dtype, spans
from engine.model.dropout import Dropout
from engine.model.llama import TransformerBlock
from engine.planning.checkpoint_policy import LayerPolicy


@dataclass(frozen=True)
class LayerExecution:
    """How one layer runs: what it keeps, where, and in tiles of how many rows (None: all at once).

    projects_once   backward keeps the graph of q, k and v, and with it the normed input, where making it anew costs
                    messages (tensor parallelism); needs tile_tokens None
    """

    policy: LayerPolicy
    store: ActivationStore
    tile_tokens: int | None = None
    projects_once: bool = False


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer; holds no results."""

    layer: TransformerBlock
    execution: LayerExecution
    cos: Tensor
    sin: Tensor
    runtime: AttentionRuntime
    device: torch.device
    dropout: Dropout | None = None

    def tiles(self, hidden: Tensor) -> Iterator[slice]:
        """Row ranges of hidden [B, T, d]; one that leaves the rows as they are, without tiles."""
        if self.execution.tile_tokens is None:
            return iter([slice(None)])
        return spans(hidden.shape[1], self.execution.tile_tokens)

    # ---- forward ------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SavedAttention]:
        """(out [T, B*H, D], what backward needs)."""
        execution = self.runtime.forward_execution(q, k, v, self.device)
        execution.run()
        return self.runtime.collect(execution, q, k, v)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, B*H, D], k and v [T, B*K, D], where the attention plan wants them."""
        stores: list[Tensor] = []
        for rows in self.tiles(hidden):
            parts = self.layer.project(hidden_rows(hidden, rows, self.device), self.cos[rows], self.sin[rows])
            if self.execution.tile_tokens is None and not self.runtime.on_host:
                q, k, v = (fold(part).contiguous() for part in parts)
                return q, k, v
            stores = stores or [self._store(part, hidden.shape[1]) for part in parts]
            for store, part in zip(stores, parts, strict=True):
                store[rows].copy_(part.transpose(0, 1), non_blocking=True)
        q, k, v = (store.flatten(1, 2) for store in stores)
        return q, k, v

    def finish(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The layer's output [B, T, d] of hidden [B, T, d] and attention's out."""
        if self.execution.tile_tokens is None and hidden.device == out.device:
            return self.layer.finish(hidden, unfold(out, hidden.shape[0]), dropout=self.dropout)
        result = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device)
        for rows in self.tiles(hidden):
            out_rows = unfold(fetched(out[rows], self.device), hidden.shape[0])
            hidden_part = hidden_rows(hidden, rows, self.device)
            result[:, rows] = self.layer.finish(hidden_part, out_rows, dropout=self._dropout_of(rows))
        return result

    def to_keep(self, hidden: Tensor, out: Tensor, saved: SavedAttention) -> dict[str, Tensor]:
        """What the policy keeps, by name."""
        policy = self.execution.policy
        kept = {"hidden": self.runtime.stored(hidden.detach())} if policy.keeps_input else {}
        if policy.kind == "none":
            kept |= {name: getattr(saved, name) for name in ("q", "k", "v", "out", "lse")}
            return kept if out is saved.out else kept | {"own_out": out}
        if policy.kind != "full":
            results = self.runtime.kept_of(saved)
            kept |= {"out": results.out, "lse": results.lse}
        return kept

    # ---- backward -----------------------------------------------------------------------------------------------

    def attended(
        self, hidden: Tensor, kept: dict[str, Tensor], projected: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, SavedAttention]:
        """What `attend` gave, from what was kept of it; `projected`: what the layer's `project` gives, if known."""
        if "q" in kept:
            saved = SavedAttention(*(kept[name] for name in ("q", "k", "v", "out", "lse")))
            return kept.get("own_out", saved.out), saved
        if projected is None:
            q, k, v = self.project(hidden)
        else:
            q, k, v = (fold(part.detach()).contiguous() for part in projected)
        results = KeptResults(kept["out"], kept["lse"]) if "out" in kept else None
        return self.runtime.attend_again((q, k, v), results, self.device)

    def own_out(self, hidden: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """Attention's out of the own rows under a policy that keeps it all; after a head exchange it lies elsewhere."""
        exchanged = self.runtime.recompute is not None and "out" in self.runtime.recompute.arguments
        return self.attended(hidden, kept)[0] if exchanged else kept["out"]

    def backpropagate(
        self, hidden: Tensor, kept: dict[str, Tensor], dy: Tensor, kv_heads: int
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of the input and of the parameters that are trained, given that of the output [B, T, d].

        kv_heads: those of k [T, kv_heads, D].
        """
        sums = _ParameterSums([parameter for parameter in self.layer.parameters() if parameter.requires_grad])
        graph = self._graph_of_project(hidden, slice(None)) if self.execution.projects_once else None
        attended = self.attended(hidden, kept, graph[1] if graph else None)
        dx, execution = self._through_finish(hidden, attended, dy, sums, kv_heads)
        del attended  # attention's backward pass needs less than all that was made again
        execution.run()
        found = {**execution.argument("dq"), **execution.argument("dkv")}
        for rows in self.tiles(hidden):
            x_rows, projected = graph or self._graph_of_project(hidden, rows, values=False)
            parts = (fetched(found[name][rows], self.device).to(hidden.dtype) for name in ("dq", "dk", "dv"))
            flowing = [unfold(part, hidden.shape[0]) for part in parts]
            (dx_rows,) = sums.add(projected, flowing, [x_rows])
            dx[:, rows].add_(dx_rows)
        return dx, sums.of_parameters()

    def _graph_of_project(
        self, hidden: Tensor, rows: slice, *, values: bool = True
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(input, q, k and v) of some rows with the graph between them."""
        x = leaf(hidden_rows(hidden, rows, self.device))
        with torch.enable_grad():
            return x, self.layer.project(x, self.cos[rows], self.sin[rows], values=values)

    def _through_finish(
        self,
        hidden: Tensor,
        attended: tuple[Tensor, SavedAttention],
        dy: Tensor,
        sums: _ParameterSums,
        kv_heads: int,
    ) -> tuple[Tensor, Execution]:
        """(gradient of the input so far, attention's backward pass, ready to run) by way of all that follows it."""
        out, saved = attended
        dx: Tensor | None = None
        dout, stats = self.runtime.empty(out.shape, out.dtype, dy.device), None
        if self.runtime.takes_stats:
            stats = self.runtime.empty((*saved.lse.shape, 2), saved.lse.dtype, dy.device)
        for rows in self.tiles(hidden):
            x_rows = leaf(hidden_rows(hidden, rows, dy.device))
            out_rows = leaf(unfold(fetched(out[rows], dy.device), dy.shape[0]))
            with torch.enable_grad():
                y_rows = self.layer.finish(x_rows, out_rows, values=False, dropout=self._dropout_of(rows))
            dx_rows, dout_rows = sums.add([y_rows], [dy[:, rows]], [x_rows, out_rows])
            del y_rows
            if rows == slice(None):
                dx = dx_rows
            else:
                dx = torch.empty(dy.shape, dtype=dx_rows.dtype, device=dy.device) if dx is None else dx
                dx[:, rows] = dx_rows
            folded = fold(dout_rows)
            dout[rows].copy_(folded, non_blocking=True)
            if stats is not None:
                lse = fetched(saved.lse[rows], dy.device)
                stats[rows].copy_(backward_stats(folded, fold(out_rows.detach()), lse), non_blocking=True)
        assert dx is not None
        return dx, self.runtime.backward_execution(saved, dout, kv_heads, stats=stats, device=dy.device)

    def _dropout_of(self, rows: slice) -> Dropout | None:
        return None if self.dropout is None else self.dropout.of(rows)

    def _store(self, part: Tensor, tokens: int) -> Tensor:
        """Memory [T, B, heads, D] for what `part` [B, n, heads, D] is a tile of."""
        batch, _, heads, head_dim = part.shape
        return self.runtime.empty((tokens, batch, heads, head_dim), part.dtype, part.device)


class _ParameterSums:
    """Sums over tiles of the gradients of parameters, in fp32 (float64 for float64)."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, outputs: Sequence[Tensor], flowing: Sequence[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of `inputs`, given those of `outputs`; the parameters' are added up."""
        found = torch.autograd.grad(outputs, [*inputs, *self._parameters], flowing, allow_unused=True)
        of_parameters: Sequence[Tensor | None] = found[len(inputs) :]
        for index, gradient in enumerate(of_parameters):
            total = self._sums[index]
            if gradient is None or total is None:  # None: of the layer's other half
                self._sums[index] = total if gradient is None else gradient
            else:  # the only tile's gradient is never widened
                self._sums[index] = total.to(accumulate_dtype(gradient.dtype)).add_(gradient)
        return found[: len(inputs)]

    def of_parameters(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes."""
        pairs = zip(self._sums, self._parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


def fetched(x: Tensor, device: torch.device) -> Tensor:
    """x, contiguous, on `device`. A cast or a gap would be the host's work, ahead of copies to x still in flight."""
    assert x.is_contiguous() or x.device == device
    return x.to(device, non_blocking=True)


def hidden_rows(hidden: Tensor, rows: slice, device: torch.device) -> Tensor:
    """Rows of [B, T, d] on `device`."""
    if hidden.device == device:
        return hidden[:, rows]
    return torch.stack([fetched(sequence[rows], device) for sequence in hidden])


def leaf(x: Tensor) -> Tensor:
    """x, to differentiate with respect to."""
    return x.detach().requires_grad_()


def fold(x: Tensor) -> Tensor:
    """[n, B*heads, D] from [B, n, heads, D]."""
    return x.transpose(0, 1).flatten(1, 2)


def unfold(x: Tensor, batch: int) -> Tensor:
    """[B, n, heads, D] from [n, B*heads, D]."""
    return x.view(x.shape[0], batch, -1, x.shape[2]).transpose(0, 1)
