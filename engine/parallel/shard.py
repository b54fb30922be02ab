"""One rank's part of a batch: padded, then tokens, labels and positions taken by the same layout.

    tokens   t0 t1 t2 t3 t4 pad pad pad     labels   t1 t2 t3 t4 t5 -100 -100 -100
    zigzag, cp_size=2      rank 0: t0 t1 | pad pad      rank 1: t2 t3 | t4 pad

Labels were shifted by the data loader, before sharding, so the label of a block's last token is never lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layout import Layout
from engine.loss.options import IGNORE_INDEX

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LocalBatch:
    """tokens and labels [B, T] int64, positions [T] int64 (global), on this rank's device."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor


def shard_batch(
    tokens: IntArray, labels: IntArray, *, layout: Layout, cp_rank: int, device: torch.device
) -> LocalBatch:
    """The rows of `cp_rank` of whole sequences [B, N]; positions beyond N get token 0 and label -100."""
    padding = layout.seq_len - tokens.shape[1]
    if padding < 0 or tokens.shape != labels.shape:
        raise ValueError(f"tokens {tokens.shape} and labels {labels.shape} do not fit a layout of {layout.seq_len}")
    positions = layout.positions(cp_rank)
    own_tokens = np.pad(tokens, ((0, 0), (0, padding)))[:, positions]
    own_labels = np.pad(labels, ((0, 0), (0, padding)), constant_values=IGNORE_INDEX)[:, positions]
    return LocalBatch(
        tokens=torch.from_numpy(own_tokens).to(device, non_blocking=True),
        labels=torch.from_numpy(own_labels).to(device, non_blocking=True),
        positions=torch.from_numpy(positions).to(device, non_blocking=True),
    )
