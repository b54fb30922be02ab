"""The gated delta rule by flash-linear-attention (fla), whose kernels need a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.attention.linear.rule import DeltaInputs
from engine.attention.linear.sequence import LinearSequence
from engine.attention.linear.states import scan_states


class FlashLinearDeltaRule:
    """`DeltaRule` by one call of the library, which takes every part of a document on this rank as a sequence.

    Value columns [v | 0] of widths dv and dk, and an initial state [0 | I] where the document began before the span,
    give all that the state before the span is needed for:

        output       [out_0 | L]     out = out_0 + L S_in
        final state  [B | A]         S_out = A S_in + B; A is zero where a document begins in the span
    """

    name = "flash-linear-attention"

    def __init__(self, gated_delta_rule: Callable[..., Any], channel_gated: Callable[..., Any]) -> None:
        """Functions with the interface of fla's chunk_gated_delta_rule and chunk_kda."""
        self._gated_delta_rule, self._channel_gated = gated_delta_rule, channel_gated

    @classmethod
    def of_library(cls) -> FlashLinearDeltaRule:
        """That of the installed library."""
        gated, kda = (importlib.import_module(f"fla.ops.{name}") for name in ("gated_delta_rule", "kda"))
        return cls(gated.chunk_gated_delta_rule, kda.chunk_kda)

    def __call__(self, inputs: DeltaInputs, sequence: LinearSequence) -> Tensor:
        """See `DeltaRule`; states pass in float32 or wider."""
        q, k, v, g, beta, normalizes_qk = inputs
        (batch, _, heads, dv), dk = v.shape, k.shape[-1]
        if inputs.has_channel_gate and heads != k.shape[2]:
            q, k = (x.repeat_interleave(heads // k.shape[2], 2) for x in (q, k))
        parts = sequence.local_parts
        rows = [part.stop - part.start for of_span in parts for part in of_span]
        continues = [part.start > part.document for of_span in parts for part in of_span]
        # [B, T, ...] -> [1, B * T, ...]: parts of all batch entries are sequences of their own
        columns = torch.cat([v, v.new_zeros(*v.shape[:-1], dk)], -1)
        flat = [x.reshape(1, -1, *x.shape[2:]) for x in (q, k, columns, g, beta)]
        ends = torch.tensor([0, *rows * batch], device=v.device).cumsum(0)
        rule = self._channel_gated if inputs.has_channel_gate else self._gated_delta_rule
        out, final = rule(
            *flat,
            initial_state=_initial_states(torch.tensor(continues * batch, device=v.device), heads, dk, dv),
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalizes_qk,
            cu_seqlens=ends,
        )
        out = out.reshape(*v.shape[:-1], dv + dk)
        last = torch.tensor([len(of_span) for of_span in parts], device=v.device).cumsum(0) - 1
        # [batch * parts, H, dk, dv + dk] -> [spans, batch * H, dk, dv + dk]
        maps = (
            final.to(torch.promote_types(final.dtype, torch.float32))
            .reshape(batch, len(rows), heads, dk, dv + dk)[:, last]
            .transpose(0, 1)
            .flatten(1, 2)
        )
        states = scan_states(maps[..., dv:], maps[..., :dv], sequence, [1] * len(parts))
        passed = _read(out[..., dv:], states, sequence, batch).to(v.dtype)
        return torch.add(out[..., :dv], passed)


def _read(reading: Tensor, states: Tensor, sequence: LinearSequence, batch: int) -> Tensor:
    """L S_in, [B, T, H, dv] of L [B, T, H, dk] and the states before this rank's spans [spans, B * H, dk, dv]."""
    # [spans, B * H, dk, dv] -> [spans, B, H, dk, dv]
    per_span = states.reshape(len(states), batch, -1, *states.shape[2:]).to(reading.dtype)
    spans = zip(sequence.local_spans, per_span, strict=True)
    parts = [
        torch.einsum("bthk,bhkv->bthv", reading[:, span.row : span.row + span.stop - span.start], state)
        for span, state in spans
    ]
    return torch.cat(parts, 1)


def _initial_states(continues: Tensor, heads: int, dk: int, dv: int) -> Tensor:
    """[0 | I] of every part whose document began before it, zeros of the others: [parts, H, dk, dv + dk] float32."""
    identity = torch.cat([torch.zeros(dk, dv), torch.eye(dk)], -1).to(continues.device)
    return (continues[:, None, None, None] * identity).expand(-1, heads, -1, -1).contiguous()
