"""Costs of the parts of a plan: FLOPs of tiles, bytes of transfers and of local operations."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.settings import ModelConfig
from engine.planning.program.ops import Buffer, Direction, HeadPart, LocalOp, Tile, TokenBytes, Transfer, View
from engine.planning.visibility.mask import Band
from engine.predict.flops import conv_channels, ffn_rows


def pair_flops(direction: Direction, qk_dim: int, v_dim: int) -> int:
    """Return the FLOPs per visible pair of one query head; a multiply-add counts as two.

    Forward: Q K^T and P V. Backward: Q K^T (recomputed, so not in the model FLOPs of `engine.predict.flops`) and
    the gradients of q and k over `qk_dim` channels, dO V^T and the gradient of v over `v_dim`.
    """
    return 2 * (qk_dim + v_dim) if direction == "forward" else 2 * (3 * qk_dim + 2 * v_dim)


# Passes over the logits, forward and backward: softmax writes and reads them, its gradient reads and writes them.
LOSS_PASSES = 4


def layer_numbers(model: ModelConfig) -> float:
    """Return the elements per token that a layer's elementwise kernels read and write in forward; backward twice that.

    With the engine's fused kernels: two norms (4 d), two residual sums (6 d), RoPE (2 of q and k), SwiGLU (3 f). Layers
    of transformers run every operation by itself: a norm in fp32 takes 18 d in 16-bit elements, RoPE 10 of q and k,
    SwiGLU 5 f. Experts gather the rows of their tokens and add theirs to the result: 5 d for each that a token has.
    Linear layers have convolution, activation and norms of q, k and v in the place of RoPE: 12 per channel.
    """
    rotated = (model.num_heads + model.num_kv_heads) * model.head_dim
    if model.implementation == "burst":
        return 10 * model.hidden_size + 2 * rotated + 3 * model.ffn_hidden_size
    moved = 5 * model.experts_per_token * model.hidden_size * model.num_moe_layers / model.num_layers
    linear = model.linear_layers.num_layers / model.num_layers
    mixed = (1 - linear) * 10 * rotated + linear * 12 * conv_channels(model)
    return 42 * model.hidden_size + mixed + 5 / 3 * ffn_rows(model) + moved


def query_heads(tile: Tile, buffers: Sequence[Buffer], token_bytes: TokenBytes) -> int:
    """Return the number of query heads that a tile computes."""
    heads = buffers[tile.q.buffer].heads.part(tile.heads)
    return heads.counts(token_bytes.num_heads, token_bytes.num_kv_heads)[0]


def computed_pairs(band: Band, block_rows: float) -> float:
    """Return the pairs that a kernel with square blocks computes; half of a block on the edge of a band is wasted."""
    rows, keys, edges = band.num_queries, band.num_keys, band.hides_later + band.hides_earlier
    return min(rows * keys, band.area() + edges * min(rows, keys) * block_rows / 2)


def tile_flops(
    tile: Tile, buffers: Sequence[Buffer], token_bytes: TokenBytes, direction: Direction, block_rows: float = 0.0
) -> float:
    """Return the FLOPs of one kernel call over all of its heads, wasted parts of blocks included."""
    heads = query_heads(tile, buffers, token_bytes)
    flops = pair_flops(direction, token_bytes.qk_dim, token_bytes.v_dim)
    return flops * heads * computed_pairs(tile.band, block_rows)


def expansion_flops(tile: Tile, token_bytes: TokenBytes, direction: Direction) -> int:
    """Return the FLOPs of expanding the latents that a tile reads; 0 where it reads k and v.

    Backward expands them again, and its two other products are the gradients of the latents and of the weight.
    """
    products = 1 if direction == "forward" else 3
    return products * expanded_rows_flops(token_bytes, tile.band.num_keys)


def expanded_rows_flops(token_bytes: TokenBytes, rows: int) -> int:
    """Return the FLOPs of one product that expands `rows` latents to the k and v of all heads."""
    sizes = token_bytes
    if sizes.latent is None:
        return 0
    return 2 * rows * sizes.latent.rank * sizes.num_kv_heads * (sizes.qk_dim - sizes.latent.rope_dim + sizes.v_dim)


class ViewBytes:
    """Sizes of views of one rank's buffers, in bytes."""

    def __init__(self, buffers: Sequence[Buffer], token_bytes: TokenBytes) -> None:
        self._buffers = buffers
        self._token_bytes = token_bytes
        self._widths = [token_bytes.of(buffer.kind, buffer.heads) for buffer in buffers]

    def of(self, view: View) -> int:
        """Return the bytes of the rows of a view."""
        return (view.stop - view.start) * self._widths[view.buffer]

    def of_transfer(self, transfer: Transfer) -> int:
        """Return the bytes that a transfer moves."""
        view, kind = transfer.view, transfer.kind
        if kind is None:
            return self.of(view)
        return (view.stop - view.start) * self._token_bytes.of(kind, self._buffers[view.buffer].heads)

    def moved_by_tile(self, tile: Tile) -> int:
        """Return the bytes read and written to merge a tile's results into its accumulators, or to store them."""
        moved = self._of_heads(tile.sums, tile.heads) * (2 - tile.stores)
        return moved + (self._of_heads(tile.kv_sums, tile.heads) * (2 - tile.stores_kv) if tile.kv_sums else 0)

    def _of_heads(self, view: View, heads: HeadPart) -> int:
        buffer = self._buffers[view.buffer]
        return (view.stop - view.start) * self._token_bytes.of(buffer.kind, buffer.heads.part(heads))

    def moved_by_op(self, op: LocalOp) -> int:
        """Return the bytes read and written by a local operation, on the heads of the narrower side."""
        if op.src is None:
            return self.of(op.dst)
        if op.op == "finish" and self._finishes_in_place(op.src):
            return 0
        heads = max((self._buffers[view.buffer].heads for view in (op.dst, op.src)), key=lambda part: part.count)
        dst, src = (
            (view.stop - view.start) * self._token_bytes.of(self._buffers[view.buffer].kind, heads)
            for view in (op.dst, op.src)
        )
        return (2 * dst if op.op in ("add", "merge") else dst) + src

    def _finishes_in_place(self, partial: View) -> bool:
        """Return whether a partial result is the result: an argument of the plan, in the dtype of sums."""
        sizes = self._token_bytes
        return self._buffers[partial.buffer].argument is not None and sizes.element_bytes == sizes.gradient_bytes
