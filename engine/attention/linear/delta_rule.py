"""The gated delta rule over sequences that several ranks share: Gated DeltaNet (arXiv:2412.06464) and KDA (2510.26692).

    S[t] = (I - beta[t] k[t] k[t]') diag(exp g[t]) S[t-1] + beta[t] k[t] v[t]'          out[t] = S[t]' q[t] / sqrt(dk)

g is one number per head in Gated DeltaNet, one per channel of k in KDA.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from engine.attention.linear.chunked import ChunkedDeltaRule
from engine.attention.linear.flash_linear import FlashLinearDeltaRule
from engine.attention.linear.rule import DeltaInputs, DeltaRule
from engine.attention.linear.sequence import LinearSequence


def gated_delta_rule(inputs: DeltaInputs, sequence: LinearSequence, rule: DeltaRule | None = None) -> Tensor:
    """Return out [B, T, H, dv] of this rank's rows, in the dtype of v; the state ends with a document.

    Collective over the ranks that share the sequence, backward too.

    Args:
        inputs: This rank's rows.
        sequence: `SequenceContext.linear`.
        rule: Who computes it; None: see `select_delta_rule`.

    Raises:
        ValueError: the rows are not those of the sequence.
    """
    if inputs.q.shape[1] != sequence.num_rows:
        raise ValueError(
            f"gated_delta_rule: q has shape {tuple(inputs.q.shape)}, expected [batch, rows, heads, dk] with this "
            f"rank's {sequence.num_rows} rows"
        )
    sequence.calls += 1
    rule = rule or select_delta_rule(inputs.q.device, inputs.q.dtype)
    with torch.autocast(inputs.q.device.type, enabled=False):  # states need float32
        return rule(inputs, sequence)


def select_delta_rule(device: torch.device, dtype: torch.dtype, *, has_flash_linear: bool | None = None) -> DeltaRule:
    """Return the rule for tensors like this.

    flash-linear-attention where it is installed, on a GPU and in 16 bits; its kernels are Triton's, so that elsewhere
    they would fail, and they multiply in 16 bits. The chunked rule of torch for all else.

    Args:
        device: Of the tensors.
        dtype: Of q, k and v.
        has_flash_linear: Whether the library is installed; None: found out.
    """
    if has_flash_linear is None:
        has_flash_linear = importlib.util.find_spec("fla") is not None
    if device.type == "cuda" and dtype.itemsize == 2 and has_flash_linear:
        return FlashLinearDeltaRule.of_library()
    return ChunkedDeltaRule()
