"""`attention` of keys and values that are expanded from latents, whichever of them travel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.attention.context import HeadShape, SequenceContext, input_problems, sink_problems
from engine.attention.latent_attention import run_latent_attention


def latent_attention(
    q: Tensor,
    c: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    context: SequenceContext,
    layer: int = 0,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attention` of keys and values that are expanded from latents: multi-head latent attention (DeepSeek-V2).

    Head h has k = [W_k c + b_k, k_rope] and v = W_v c + b_v. Where `context.moves_latents(layer)`, c and k_rope travel
    and are expanded tile by tile; else k and v are, before they do. The result is the same.

    The gradients of weight, bias and sinks are this rank's shares: sum them over the ranks
    (`ContextParallel.sum_gradients`, DDP, FSDP).

    Args:
        q: [B, T, H, head_dim] in the context's dtype, on its device, as c and k_rope.
        c: [B, T, rank], the latents.
        k_rope: [B, T, rope_dim], the last channels of every head's key, position included.
        weight: [K * (head_dim - rope_dim + v_dim), rank], head by head: first W_k, then W_v.
        context: Of layers whose heads have a `latent`.
        layer: As of `attention`.
        bias: [K * (head_dim - rope_dim + v_dim)], in the same order; None: there is none.
        sinks: As of `attention`.

    Raises:
        ValueError: a tensor does not fit.
    """
    kind, heads = context.parallel.device.type, context.heads(layer)
    if heads.latent is None:
        raise ValueError(f"latent_attention: layer {layer} has {heads}; give ContextParallel, or heads, its latent")
    if torch.is_autocast_enabled(kind):
        q, c, k_rope = (x.to(torch.get_autocast_dtype(kind)) for x in (q, c, k_rope))
    expected = {
        "q": (q, (heads.num_heads, heads.head_dim)),
        "c": (c, (heads.latent.rank,)),
        "k_rope": (k_rope, (heads.latent.rope_dim,)),
    }
    problems = input_problems(expected, context)
    rows = heads.latent_heads.weight_shape
    if tuple(weight.shape) != rows or (bias is not None and tuple(bias.shape) != rows[:1]):
        given = tuple(weight.shape), None if bias is None else tuple(bias.shape)
        problems.append(f"weight and bias have shapes {given[0]} and {given[1]}, expected {rows} and {rows[:1]}")
    if sinks is not None:
        problems += sink_problems(sinks, heads.num_heads, context.parallel.device)
    if problems:
        raise ValueError("latent_attention: " + "; ".join(problems))
    with torch.autocast(kind, enabled=False):
        if context.moves_latents(layer):
            latents, runtime = torch.cat([c, k_rope], -1), context.layer_runtime(layer)
            return run_latent_attention(q, latents, weight, bias, runtime, heads.latent_heads, sinks)
        return context(q, *_expanded(c, k_rope, weight, bias, heads), layer, sinks)


def _expanded(
    c: Tensor, k_rope: Tensor, weight: Tensor, bias: Tensor | None, heads: HeadShape
) -> tuple[Tensor, Tensor]:
    """k [B, T, K, head_dim] and v [B, T, K, v_dim]."""
    flat = linear(c, weight.to(c.dtype), None if bias is None else bias.to(c.dtype))
    k_nope, v = flat.view(*c.shape[:2], heads.num_kv_heads, -1).tensor_split((heads.latent_heads.nope_dim,), -1)
    rope = k_rope[:, :, None].expand(-1, -1, heads.num_kv_heads, -1)
    return torch.cat([k_nope, rope], -1), v
