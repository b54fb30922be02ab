"""The compared methods of other packages: which rows a rank holds and the package's own function on them.

The packages are importable in the ranks only (`benchmarks.bench_peers` sets their path), so they are imported late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.bench.spec import AttentionCell
from engine.config.errors import ConfigError
from engine.config.settings import LayoutName
from engine.planning.visibility.layout import build_layout

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # local q, k, v -> out, all [1, T, heads, D]


@dataclass(frozen=True)
class PeerMethod:
    """A method on this rank; `positions` [T] are the global positions of its rows."""

    name: str
    positions: Tensor
    attention: Attention


def build_peer(name: str, cell: AttentionCell) -> PeerMethod:
    """The named method; collective, because some make process groups. ConfigError when the shape does not suit it."""
    positions, attention = PEERS[name](cell)
    return PeerMethod(name, positions, attention)


Built = tuple[Tensor, Attention]


def _positions(cell: AttentionCell, layout: LayoutName) -> Tensor:
    return torch.from_numpy(build_layout(layout, cell.seq_len, dist.get_world_size()).positions(dist.get_rank()))


def _ring(cell: AttentionCell) -> Built:
    from ring_flash_attn import ring_flash_attn_func

    return _positions(cell, "contiguous"), lambda q, k, v: ring_flash_attn_func(q, k, v, causal=True)


def _zigzag(cell: AttentionCell) -> Built:
    from ring_flash_attn import zigzag_ring_flash_attn_func

    return _positions(cell, "zigzag"), lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True)


def _stripe(cell: AttentionCell) -> Built:
    from ring_flash_attn import stripe_flash_attn_func

    return _positions(cell, "striped"), lambda q, k, v: stripe_flash_attn_func(q, k, v, causal=True)


def _llama3(cell: AttentionCell) -> Built:
    """All kv heads are gathered at once: the fewest messages."""
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

    whole = torch.tensor([0, cell.seq_len], dtype=torch.int32)
    prepared = llama3_flash_attn_prepare_cu_seqlens(whole, True, dist.get_rank(), dist.get_world_size())
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, keys = prepared
    options: dict[str, Any] = {"heads_k_stride": cell.shape.num_kv_heads, "local_k_slice": keys, "causal": True}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out: Tensor = llama3_flash_attn_varlen_func(q[0], k[0], v[0], *lengths, **options)
        return out[None]

    return _positions(cell, "contiguous"), attention


def _ulysses(cell: AttentionCell) -> Built:
    from yunchang import UlyssesAttention

    _check_heads(cell, dist.get_world_size())
    layer = UlyssesAttention(dist.group.WORLD)
    return _positions(cell, "contiguous"), lambda q, k, v: layer(q, k, v, causal=True)


def _usp(cell: AttentionCell, *, head_degree: int = 2) -> Built:
    """Heads over neighbouring pairs of ranks, a zigzag ring over the pairs."""
    from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg

    rank, size = dist.get_rank(), dist.get_world_size()
    _check_heads(cell, head_degree)
    if size % head_degree:
        raise ConfigError(f"yunchang/usp: {size} ranks are not a multiple of its head degree {head_degree}")
    set_seq_parallel_pg(head_degree, size // head_degree, rank, size)
    layer = LongContextAttention(ring_impl_type="zigzag")
    extract = EXTRACT_FUNC_DICT["zigzag"]
    positions = extract(torch.arange(cell.seq_len)[None], rank, size, rd=size // head_degree, ud=head_degree)[0]
    return positions, lambda q, k, v: layer(q, k, v, causal=True)


def _check_heads(cell: AttentionCell, degree: int) -> None:
    if cell.shape.num_kv_heads % degree:
        raise ConfigError(f"yunchang: {cell.shape.num_kv_heads} kv heads cannot be divided by {degree}")


PEERS: dict[str, Callable[[AttentionCell], Built]] = {
    "ring-flash-attn/ring": _ring,
    "ring-flash-attn/zigzag": _zigzag,
    "ring-flash-attn/stripe": _stripe,
    "ring-flash-attn/llama3": _llama3,
    "yunchang/ulysses": _ulysses,
    "yunchang/usp": _usp,
}

# What of ours is the same method, as points of `engine.bench.spec`.
COUNTERPARTS = {
    "ring-flash-attn/ring": "ring:layout=contiguous",
    "ring-flash-attn/zigzag": "ring",
    "ring-flash-attn/stripe": "striped",
    "ring-flash-attn/llama3": "megatron_allgather:layout=contiguous",
    "yunchang/ulysses": "ulysses",
    "yunchang/usp": "usp:head_parallel_size=2",
}
