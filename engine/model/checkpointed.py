"""Layers that keep for backward what their policy says and compute the rest again, all rows at once or tile by tile.

A transformer layer is row by row but for attention, so its backward pass is a chain of four parts, each of which asks
for little:

    x -> project -> q, k, v        again, if they were not kept
    q, k, v -> attention           again for those rows only whose (out, lse) were not kept: engine.memory.policy
    x, out -> finish               again with a graph, without its last product; dy -> dx, dout
    dout -> attention backward     dq, dk, dv
    x -> project                   for its gradients only, no product at all; dq, dk, dv -> dx

With tiles the parts but attention run on a few rows at a time, so that no tensor of rows x ffn exists. What is kept
goes through a store, to device or host memory; when the attention plan itself keeps its chunks in host memory, the
layer's inputs and results lie there as well. No tile needs a message, so ranks may have different numbers of tiles.

All state lives in the autograd context: evaluation, several micro-batches in flight and exceptions leave none behind.
Sources: Chen et al. 2016; Gu et al. 2024 and Sun et al. 2025 (engine.memory.policy); Yao et al. 2024 (FPDT) and
Bekman et al. 2025 (ALST: tiled MLP).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from engine.attention.executor import Execution
from engine.attention.merge import backward_stats
from engine.attention.runtime import AttentionRuntime, ForwardPass, KeptResults, PlannedAttention, SavedAttention
from engine.memory.policy import LayerPolicy
from engine.memory.store import ActivationStore, DeviceStore, HostStore, Kept, offloaded
from engine.model.llama import AttentionFn, LlamaModel, TransformerBlock
from engine.model.tiles import LayerGradients, fetched, fold, hidden_rows, leaf, unfold
from engine.row_blocks import spans


@dataclass(frozen=True)
class LayerManner:
    """How one layer runs: what it keeps, where, and in tiles of how many rows (None: all at once).

    projects_once   backward keeps the graph of q, k and v, and with it the normed input, where making it anew costs
                    messages (tensor parallelism); needs tile_tokens None
    """

    policy: LayerPolicy
    store: ActivationStore
    tile_tokens: int | None = None
    projects_once: bool = False

    def tiles(self, rows: int) -> Iterator[slice]:
        """Row ranges that cover so many rows."""
        return spans(rows, self.tile_tokens or rows)


def apply_policies(model: LlamaModel, manners: Sequence[LayerManner]) -> None:
    """Makes every layer run in its manner, in place.

    Layers must then be given attention with a `runtime` (`engine.attention.runtime.PlannedAttention`), but for those
    that keep everything and are not tiled.
    """
    for layer, manner in zip(model.layers, manners, strict=True):
        assert isinstance(layer, TransformerBlock)
        run = run_of(layer, manner)
        if run is not None:
            # On the instance, inside FSDP's hooks: weights are gathered before forward and before backward.
            layer.forward = run  # type: ignore[method-assign]


def run_of(layer: TransformerBlock, manner: LayerManner) -> Callable[..., Tensor] | None:
    """What replaces the layer's forward; None: nothing does."""
    if manner.policy.kind != "none" or manner.tile_tokens is not None:
        return torch.compiler.disable(functools.partial(_run_layer, layer, manner))  # type: ignore[no-untyped-call, no-any-return]
    if isinstance(manner.store, HostStore):
        return functools.partial(_run_offloaded, layer, layer.forward, manner.store)
    return None


def _run_offloaded(
    layer: TransformerBlock,
    forward: Callable[..., Tensor],
    store: ActivationStore,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention: AttentionFn,
) -> Tensor:
    """TransformerBlock.forward, of which autograd keeps everything, in the store."""
    shared = [*layer.parameters(), cos, sin]  # which every layer uses
    with offloaded(store, leave=shared) if torch.is_grad_enabled() else contextlib.nullcontext():
        return forward(hidden, cos, sin, attention)


def _run_layer(
    layer: TransformerBlock, manner: LayerManner, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Any
) -> Tensor:
    """TransformerBlock.forward in a manner."""
    function = attention if isinstance(attention, PlannedAttention) else PlannedAttention(attention.runtime)
    call = _Call(layer, manner, cos, sin, function.runtime, hidden.device)
    group = _group_of(call, function.forward_pass) if torch.is_grad_enabled() else None
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    out: Tensor = _LayerFunction.apply(call, group, hidden, *parameters)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Call:
    """One call of a layer; holds no results."""

    layer: TransformerBlock
    manner: LayerManner
    cos: Tensor
    sin: Tensor
    runtime: AttentionRuntime
    device: torch.device

    def tiles(self, hidden: Tensor) -> Iterator[slice]:
        """Row ranges of hidden [B, T, d]; one that leaves the rows as they are, without tiles."""
        if self.manner.tile_tokens is None:
            return iter([slice(None)])
        return self.manner.tiles(hidden.shape[1])

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
            if self.manner.tile_tokens is None and not self.runtime.on_host:
                q, k, v = (fold(part).contiguous() for part in parts)
                return q, k, v
            stores = stores or [self._store(part, hidden.shape[1]) for part in parts]
            for store, part in zip(stores, parts, strict=True):
                store[rows].copy_(part.transpose(0, 1), non_blocking=True)
        q, k, v = (store.flatten(1, 2) for store in stores)
        return q, k, v

    def finish(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The layer's output [B, T, d] of hidden [B, T, d] and attention's out."""
        if self.manner.tile_tokens is None and hidden.device == out.device:
            return self.layer.finish(hidden, unfold(out, hidden.shape[0]))
        result = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device)
        for rows in self.tiles(hidden):
            out_rows = unfold(fetched(out[rows], self.device), hidden.shape[0])
            result[:, rows] = self.layer.finish(hidden_rows(hidden, rows, self.device), out_rows)
        return result

    def to_keep(self, hidden: Tensor, out: Tensor, saved: SavedAttention) -> dict[str, Tensor]:
        """What the policy keeps, by name."""
        policy = self.manner.policy
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
        exchanged = self.runtime.recompute is not None and "out" in self.runtime.recompute.pins
        return self.attended(hidden, kept)[0] if exchanged else kept["out"]

    def backpropagate(self, hidden: Tensor, kept: dict[str, Tensor], dy: Tensor, kv_heads: int) -> LayerGradients:
        """Gradients of everything, given that of the output [B, T, d]; kv_heads: those of k [T, kv_heads, D]."""
        gradients = LayerGradients([p for p in self.layer.parameters() if p.requires_grad])
        graph = self._graph_of_project(hidden) if self.manner.projects_once else None
        attended = self.attended(hidden, kept, graph[1] if graph else None)
        execution = self._through_finish(hidden, attended, dy, gradients, kv_heads)
        execution.run()
        del attended
        dq, dkv = execution.pinned("dq")["dq"], execution.pinned("dkv")["dkv"]
        self._through_project(hidden, (dq, dkv), gradients, graph)
        return gradients

    def _graph_of_project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(input, q, k and v) of all rows with the graph between them."""
        x = leaf(hidden)
        with torch.enable_grad():
            return x, self.layer.project(x, self.cos, self.sin)

    def _through_finish(
        self,
        hidden: Tensor,
        attended: tuple[Tensor, SavedAttention],
        dy: Tensor,
        gradients: LayerGradients,
        kv_heads: int,
    ) -> Execution:
        """Backward pass of attention, ready to run, after that of all that follows it."""
        out, saved = attended
        dout = self.runtime.empty(out.shape, out.dtype, dy.device)
        exchanged = "dout" in self.runtime.backward.pins
        stats = None if exchanged else self.runtime.empty((*saved.lse.shape, 2), saved.lse.dtype, dy.device)
        for rows in self.tiles(hidden):
            x_rows = leaf(hidden_rows(hidden, rows, dy.device))
            out_rows = leaf(unfold(fetched(out[rows], dy.device), dy.shape[0]))
            with torch.enable_grad():
                y_rows = self.layer.finish(x_rows, out_rows, values=False)
            dx, dout_rows = gradients.add([y_rows], [dy[:, rows]], [x_rows, out_rows])
            del y_rows
            gradients.add_input(rows, dx, dy)
            folded = fold(dout_rows)
            dout[rows].copy_(folded, non_blocking=True)
            if stats is not None:
                lse = fetched(saved.lse[rows], dy.device)
                stats[rows].copy_(backward_stats(folded, fold(out_rows.detach()), lse), non_blocking=True)
        return self.runtime.backward_execution(saved, dout, kv_heads, stats=stats, device=dy.device)

    def _through_project(
        self,
        hidden: Tensor,
        flowing_back: tuple[Tensor, Tensor],
        gradients: LayerGradients,
        graph: tuple[Tensor, tuple[Tensor, ...]] | None,
    ) -> None:
        """Add what flows back through q, k and v: dq [T, B*H, D], dkv [T, 2, B*K, D]; over the `graph`, if there is."""
        dq, dkv = flowing_back
        batch, device, dtype = hidden.shape[0], self.device, hidden.dtype
        for rows in self.tiles(hidden):
            if graph is not None:
                x_rows, projected = graph
            else:
                x_rows = leaf(hidden_rows(hidden, rows, device))
                with torch.enable_grad():
                    projected = self.layer.project(x_rows, self.cos[rows], self.sin[rows], values=False)
            dq_rows, dkv_rows = (fetched(x[rows], device).to(dtype) for x in (dq, dkv))
            flowing = [unfold(part, batch) for part in (dq_rows, dkv_rows[:, 0], dkv_rows[:, 1])]
            (dx,) = gradients.add(projected, flowing, [x_rows])
            gradients.add_input(rows, dx, hidden)

    def _store(self, part: Tensor, tokens: int) -> Tensor:
        """Memory [T, B, heads, D] for what `part` [B, n, heads, D] is a tile of."""
        batch, _, heads, head_dim = part.shape
        return self.runtime.empty((tokens, batch, heads, head_dim), part.dtype, part.device)


class _Link:
    """What one call of a layer left behind: the call, and what was kept of it."""

    def __init__(self, call: _Call, tensors: dict[str, Tensor]) -> None:
        self.call = call
        self._names = tuple(tensors)
        # What plans leave in host memory lies where it belongs.
        store = DeviceStore() if call.runtime.on_host else call.manner.store
        self._kept: Kept = store.keep(list(tensors.values()))

    def fetch(self) -> dict[str, Tensor]:
        """What was kept, by name."""
        return dict(zip(self._names, self._kept.fetch(), strict=True))

    def release(self) -> None:
        """Backward is done with it."""
        self._kept.release()


class _Group:
    """Layers of one forward pass that share the input of the first of them; the other inputs follow by linear work."""

    def __init__(self) -> None:
        self.links: list[_Link] = []
        self._inputs: dict[int, Tensor] = {}

    def input_of(self, place: int, kept: dict[str, Tensor]) -> Tensor:
        """Input of the layer at `place`, of which so much was kept; the first that asks makes all before it, too."""
        if "hidden" in kept:
            return kept["hidden"]
        if place not in self._inputs:
            self._walk(place)
        return self._inputs.pop(place)

    def _walk(self, last: int) -> None:
        hidden = self.links[0].fetch()["hidden"]
        for place, link in enumerate(self.links[:last]):
            with _gathered(link.call.layer, stays=place == last - 1):  # whose backward is next
                hidden = link.call.finish(hidden, link.call.own_out(hidden, link.fetch()))
            self._inputs[place + 1] = hidden


def _group_of(call: _Call, forward_pass: ForwardPass) -> _Group:
    """The group of a layer in this forward pass; the layer that keeps its input begins one."""
    place = call.manner.policy.place
    if place == 0:
        forward_pass.group = _Group()
    group = forward_pass.group
    if not isinstance(group, _Group) or len(group.links) != place:
        raise RuntimeError(
            f"attn_out_every: layer {place} of a group ran, but not those before it in the same forward pass; call "
            "the layers in order, with the functions of one AttentionContext.functions()"
        )
    return group


@contextlib.contextmanager
def _gathered(layer: TransformerBlock, *, stays: bool) -> Iterator[None]:
    """The layer's whole weights, outside of its own forward and backward; all ranks of its FSDP group must call."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    yield
    if not stays:
        layer.reshard()


class _LayerFunction(torch.autograd.Function):
    """One layer. Parameters are inputs, so that their gradients take autograd's own way."""

    @staticmethod
    def forward(ctx: Any, call: _Call, group: _Group | None, hidden: Tensor, *parameters: Tensor) -> Tensor:
        """[B, T, d]."""
        q, k, v = call.project(hidden)
        out, saved = call.attend(q, k, v)
        if group is not None:  # a backward pass may follow
            ctx.link = _Link(call, call.to_keep(hidden, out, saved))
            ctx.group, ctx.place, ctx.kv_heads = group, len(group.links), k.shape[1]
            group.links.append(ctx.link)
        del q, k, v, saved  # what is not kept is freed before the MLP runs
        return call.finish(hidden, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and of the parameters."""
        kept = ctx.link.fetch()
        hidden = ctx.group.input_of(ctx.place, kept)
        gradients = ctx.link.call.backpropagate(hidden, kept, dy, ctx.kv_heads)
        ctx.link.release()
        return None, None, gradients.dx, *gradients.of_parameters()
