"""One call of a layer: its forward pass, the tensors it saves, and the parts of its backward pass.

Shapes: B sequences of T local rows; H query heads and K kv heads of size D. The layer works on [B, T, ...]; attention
plans work on [T, B*H, D], sequences folded into the heads, so that a slice of rows is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.activations.store import ActivationStore
from engine.attention.executor import Execution
from engine.attention.merge import backward_stats
from engine.attention.runtime import AttentionRuntime, SavedAttention, SavedResults
from engine.device.row_blocks import accumulate_dtype, spans
from engine.model.dropout import Dropout
from engine.model.llama import TransformerBlock
from engine.planning.checkpoint_policy import LayerPolicy


@dataclass(frozen=True)
class LayerExecution:
    """How one layer runs.

    Attributes:
        policy: What the layer saves for backward.
        store: Where it saves it.
        tile_tokens: Rows per tile; None runs all rows together.
        projects_once: Backward runs `project` once, with values, and reuses its graph for the gradients. Under tensor
            parallelism a second run would gather the rows again. Needs tile_tokens None.
    """

    policy: LayerPolicy
    store: ActivationStore
    tile_tokens: int | None = None
    projects_once: bool = False


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer with its arguments; holds no results.

    Attributes:
        cos, sin: Rotary tables of the local rows, [T, D / 2].
        runtime: Plans and kernel of its attention.
        device: Where the layer computes; its input may be in host memory.
    """

    layer: TransformerBlock
    execution: LayerExecution
    cos: Tensor
    sin: Tensor
    runtime: AttentionRuntime
    device: torch.device
    dropout: Dropout | None = None

    def tiles(self, hidden: Tensor) -> Iterator[slice]:
        """Yield the ranges of rows of hidden [B, T, d] to work on; a single slice(None) without tiles."""
        if self.execution.tile_tokens is None:
            return iter([slice(None)])  # indexing with it is a view, so untiled layers copy nothing
        return spans(hidden.shape[1], self.execution.tile_tokens)

    # ---- forward ------------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SavedAttention]:
        """Run attention; return out [T, B*H, D] and what its backward pass needs. Collective over the cp group."""
        execution = self.runtime.forward_execution(q, k, v, self.device)
        execution.run()
        return self.runtime.collect(execution, q, k, v)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, B*H, D], k and v [T, B*K, D] of hidden [B, T, d], on host or device as the plan expects."""
        stores: list[Tensor] = []
        for rows in self.tiles(hidden):
            parts = self.layer.project(hidden_rows(hidden, rows, self.device), self.cos[rows], self.sin[rows])
            if self.execution.tile_tokens is None and not self.runtime.on_host:
                q, k, v = (fold(part).contiguous() for part in parts)  # [B, T, H, D] -> [T, B*H, D]
                return q, k, v
            stores = stores or [self._store(part, hidden.shape[1]) for part in parts]
            for store, part in zip(stores, parts, strict=True):
                store[rows].copy_(part.transpose(0, 1), non_blocking=True)  # [B, n, H, D] -> [n, B, H, D]
        q, k, v = (store.flatten(1, 2) for store in stores)  # [T, B, H, D] -> [T, B*H, D], a view
        return q, k, v

    def finish(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Return the layer's output [B, T, d] for its input hidden [B, T, d] and attention's out [T, B*H, D]."""
        if self.execution.tile_tokens is None and hidden.device == out.device:
            return self.layer.finish(hidden, unfold(out, hidden.shape[0]), dropout=self.dropout)
        result = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device)
        for rows in self.tiles(hidden):
            out_rows = unfold(fetched(out[rows], self.device), hidden.shape[0])
            hidden_part = hidden_rows(hidden, rows, self.device)
            result[:, rows] = self.layer.finish(hidden_part, out_rows, dropout=self._dropout_of(rows))
        return result

    def tensors_to_save(self, hidden: Tensor, out: Tensor, saved: SavedAttention) -> dict[str, Tensor]:
        """Return the tensors that the policy saves, by name: hidden, q, k, v, out, lse, local_out or some of them."""
        policy = self.execution.policy
        tensors = {"hidden": self.runtime.stored(hidden.detach())} if policy.saves_input else {}
        if policy.kind == "none":
            tensors |= {"q": saved.q, **saved.kv, "out": saved.out, "lse": saved.lse}
            # After a head exchange `saved.out` is that of other rows and heads; `finish` needs that of the local rows.
            return tensors if out is saved.out else tensors | {"local_out": out}
        if policy.kind != "full":
            results = self.runtime.saved_results(saved)
            tensors |= {"out": results.out, "lse": results.lse}
        return tensors

    # ---- backward -----------------------------------------------------------------------------------------------

    def attended(
        self, hidden: Tensor, tensors: dict[str, Tensor], projected: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, SavedAttention]:
        """Return the results of `attend`, recomputing what is not in `tensors`. Collective if attention is recomputed.

        Args:
            hidden: The layer's input, [B, T, d].
            tensors: What `tensors_to_save` returned.
            projected: q, k and v as the layer's `project` returns them, if known.
        """
        if "q" in tensors:
            kv = {name: tensors[name] for name in ("k", "v")}
            saved = SavedAttention(tensors["q"], kv, tensors["out"], tensors["lse"])
            return tensors.get("local_out", saved.out), saved
        if projected is None:
            q, k, v = self.project(hidden)
        else:
            q, k, v = (fold(part.detach()).contiguous() for part in projected)
        results = SavedResults(tensors["out"], tensors["lse"]) if "out" in tensors else None
        return self.runtime.attend_again((q, k, v), results, self.device)

    def local_out(self, hidden: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Return attention's out [T, B*H, D] of the local rows, under a policy that saves all of it.

        After a head exchange the saved out is that of other rows and heads, so the plan sends it back.
        """
        exchanged = self.runtime.recompute is not None and "out" in self.runtime.recompute.arguments
        return self.attended(hidden, tensors)[0] if exchanged else tensors["out"]

    def backpropagate(
        self, hidden: Tensor, tensors: dict[str, Tensor], dy: Tensor, kv_heads: int
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of the layer's input, [B, T, d], and of its trained parameters. Collective.

        Args:
            hidden: The layer's input, [B, T, d].
            tensors: What `tensors_to_save` returned.
            dy: Gradient of the layer's output, [B, T, d].
            kv_heads: Folded kv heads, B*K.
        """
        sums = _ParameterSums([parameter for parameter in self.layer.parameters() if parameter.requires_grad])
        graph = self._graph_of_project(hidden, slice(None)) if self.execution.projects_once else None
        attended = self.attended(hidden, tensors, graph[1] if graph else None)
        dx, execution = self._through_finish(hidden, attended, dy, sums, kv_heads)
        del attended  # attention's backward pass needs less than all that was recomputed
        execution.run()
        # dq [T, B*H, D], dk and dv [T, B*K, D]
        attention_gradients = {**execution.argument("dq"), **execution.argument("dkv")}
        for rows in self.tiles(hidden):
            # values=False: the gradients of a matmul do not need its result, so none runs here.
            x_rows, projected = graph or self._graph_of_project(hidden, rows, values=False)
            parts = (
                fetched(attention_gradients[name][rows], self.device).to(hidden.dtype) for name in ("dq", "dk", "dv")
            )
            gradients = [unfold(part, hidden.shape[0]) for part in parts]
            (dx_rows,) = sums.add(projected, gradients, [x_rows])
            dx[:, rows].add_(dx_rows)
        return dx, sums.of_parameters()

    def _graph_of_project(
        self, hidden: Tensor, rows: slice, *, values: bool = True
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the input of some rows as a leaf, and q, k and v computed from it with their graph."""
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
        """Backpropagate through `finish`: return the input's gradient so far and attention's backward, ready to run.

        The gradient, [B, T, d], lacks the part that flows through q, k and v.
        """
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
            del y_rows  # with it the graph of this tile, before the next one is built
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
        """Allocate [T, B, heads, D] for the whole of which `part` [B, n, heads, D] is a tile."""
        batch, _, heads, head_dim = part.shape
        return self.runtime.empty((tokens, batch, heads, head_dim), part.dtype, part.device)


class _ParameterSums:
    """Sums the gradients of parameters over tiles, in fp32 (float64 for float64)."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, outputs: Sequence[Tensor], douts: Sequence[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of `inputs` for the gradients `douts` of `outputs`; add those of the parameters up."""
        gradients = torch.autograd.grad(outputs, [*inputs, *self._parameters], douts, allow_unused=True)
        of_parameters: Sequence[Tensor | None] = gradients[len(inputs) :]
        for index, gradient in enumerate(of_parameters):
            total = self._sums[index]
            if gradient is None or total is None:  # None: a parameter of the layer's other half
                self._sums[index] = total if gradient is None else gradient
            else:  # cast to fp32 at the second tile only: without tiles nothing is cast
                self._sums[index] = total.to(accumulate_dtype(gradient.dtype)).add_(gradient)
        return gradients[: len(inputs)]

    def of_parameters(self) -> list[Tensor | None]:
        """Return the sums in the dtypes of the parameters; None where no gradient reached one."""
        pairs = zip(self._sums, self._parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


def fetched(x: Tensor, device: torch.device) -> Tensor:
    """Return x, which must be contiguous, on `device` without waiting.

    A cast or a strided copy would run on the host, and read x before the copies to it that are in flight.
    """
    assert x.is_contiguous() or x.device == device
    return x.to(device, non_blocking=True)


def hidden_rows(hidden: Tensor, rows: slice, device: torch.device) -> Tensor:
    """Return rows of hidden, [B, n, d] on `device`."""
    if hidden.device == device:
        return hidden[:, rows]
    # Per sequence: rows of a batch are strided, and `fetched` copies contiguous memory only.
    return torch.stack([fetched(sequence[rows], device) for sequence in hidden])


def leaf(x: Tensor) -> Tensor:
    """Return x detached as a leaf that requires a gradient."""
    return x.detach().requires_grad_()


def fold(x: Tensor) -> Tensor:
    """[B, n, heads, D] -> [n, B*heads, D]."""
    return x.transpose(0, 1).flatten(1, 2)


def unfold(x: Tensor, batch: int) -> Tensor:
    """[n, B*heads, D] -> [B, n, heads, D], a view."""
    return x.view(x.shape[0], batch, -1, x.shape[2]).transpose(0, 1)
