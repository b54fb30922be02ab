"""States of an affine recurrence over a sequence that several ranks share, and its gradients.

    S[c + 1] = M[c] S[c] + N[c]          a chunk c of rows, per batch entry and head

A span of chunks is itself such a map, S_out = A S_in + B with A = M[last] ... M[first]. Ranks exchange the maps [A | B]
of their spans, so each knows the state before every span of its own; where a document begins, M is zero and so is A.
Gradients obey the same recurrence from the last chunk to the first, with transposed maps:

    G[c] = dS[c] + M[c]' G[c + 1]        G[c]: gradient of the state before chunk c
    dM[c] = G[c + 1] S[c]'               dN[c] = G[c + 1]

so backward runs the same code in reverse. One exchange each, of dk * (dk + dv) numbers per head and span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.attention.linear.sequence import LinearSequence


def scan_states(
    transitions: Tensor, updates: Tensor, sequence: LinearSequence, chunks_per_span: Sequence[int]
) -> Tensor:
    """Return the state before every chunk, in the dtype of the maps: float32 or wider.

    Collective over the ranks that share the sequence, backward too.

    Args:
        transitions: M, [chunks, n, dk, dk] of this rank's chunks in order, n batch entries and heads.
        updates: N, [chunks, n, dk, dv].
        sequence: Whose spans the chunks divide.
        chunks_per_span: Of each of this rank's spans.

    Returns:
        S, [chunks, n, dk, dv]; zeros before the first chunk of the sequence.
    """
    states: Tensor = _ScanStates.apply(transitions, updates, sequence, chunks_per_span)  # type: ignore[no-untyped-call]
    return states


class _ScanStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transitions: Tensor, updates: Tensor, sequence: LinearSequence, chunks_per_span: Sequence[int]
    ) -> Tensor:
        states = _scan(transitions, updates, sequence, chunks_per_span, backward=False)
        ctx.save_for_backward(transitions, states)
        ctx.sequence, ctx.chunks_per_span = sequence, chunks_per_span
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dstates,) = grad_outputs
        transitions, states = ctx.saved_tensors
        after = _scan(transitions.mT, dstates, ctx.sequence, ctx.chunks_per_span, backward=True)  # G[c + 1]
        return after @ states.mT, after, None, None


def _scan(
    transitions: Tensor, updates: Tensor, sequence: LinearSequence, chunks_per_span: Sequence[int], *, backward: bool
) -> Tensor:
    """States before every chunk in the direction of the scan; all maps of a span that no span needs stay unmade."""
    spans = sequence.spans
    needed = spans.targets if backward else spans.sources
    first, chunks = 0, {}
    for index, count in zip(spans.local(sequence.rank), chunks_per_span, strict=True):
        chunks[index] = range(first, first + count)[:: -1 if backward else 1]
        first += count
    maps = _exchange_maps(transitions, updates, sequence, chunks, backward=backward)
    states = torch.empty_like(updates)
    for index, order in chunks.items():
        state = torch.zeros_like(updates[0])
        for source in needed[index]:
            state = _apply(maps[source], state)
        for chunk in order:
            states[chunk] = state
            if chunk != order[-1]:
                state = torch.baddbmm(updates[chunk], transitions[chunk], state)
    return states


def _exchange_maps(
    transitions: Tensor, updates: Tensor, sequence: LinearSequence, chunks: dict[int, range], *, backward: bool
) -> dict[int, Tensor]:
    """Maps [A | B], [n, dk, dk + dv], by span: those of other ranks that this rank's spans need, and those it has."""
    messages = sequence.backward_messages if backward else sequence.forward_messages
    needed = sequence.spans.targets if backward else sequence.spans.sources
    wanted = {index for peer in messages.sends.values() for index in peer}
    wanted |= {source for index in chunks for source in needed[index] if source in chunks}
    maps = {index: _compose(transitions, updates, chunks[index]) for index in sorted(wanted)}
    sends = {peer: torch.stack([maps[index] for index in indexes]) for peer, indexes in messages.sends.items()}
    shape = (*updates.shape[1:-1], transitions.shape[-1] + updates.shape[-1])
    receives = {peer: updates.new_empty(len(indexes), *shape) for peer, indexes in messages.receives.items()}
    sequence.exchange(sends, receives)
    for peer, indexes in messages.receives.items():
        maps |= dict(zip(indexes, receives[peer], strict=True))
    return maps


def _compose(transitions: Tensor, updates: Tensor, order: range) -> Tensor:
    """[A | B] of the chunks in this order."""
    composed = torch.cat([transitions[order[0]], updates[order[0]]], -1)
    width = transitions.shape[-1]
    for chunk in order[1:]:
        composed = transitions[chunk] @ composed
        composed[..., width:] += updates[chunk]
    return composed


def _apply(composed: Tensor, state: Tensor) -> Tensor:
    """A S + B."""
    width = state.shape[-2]
    return torch.baddbmm(composed[..., width:], composed[..., :width], state)
