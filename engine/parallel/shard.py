"""One rank's part of a batch: padded, then tokens, labels and positions taken by the same layout.

    tokens   t0 t1 t2 t3 t4 pad pad pad     labels   t1 t2 t3 t4 t5 -100 -100 -100
    zigzag, cp_size=2      rank 0: t0 t1 | pad pad      rank 1: t2 t3 | t4 pad

Labels are the only rows that the ranks of one tensor-parallel group divide among themselves here: every rank needs all
tokens for its slice of the vocabulary and all positions for its heads, but a label must count on one rank only.

Labels were shifted by the data loader, before sharding, so the label of a block's last token is never lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.data.sampler import IGNORE_INDEX
from engine.distributed.mesh import WHOLE, RowPart
from engine.planning.visibility.layout import Layout

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LocalBatch:
    """tokens [B, T], labels [B, T / tp_size], positions [T] (global), all int64 and on this rank's device."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor


def shard_batch(
    tokens: IntArray,
    labels: IntArray,
    *,
    layout: Layout,
    cp_rank: int,
    device: torch.device,
    label_part: RowPart = WHOLE,
) -> LocalBatch:
    """The rows of `cp_rank` of whole sequences [B, N]; positions beyond N get token 0 and label -100.

    Of the labels only those of `label_part` of these rows.
    """
    padding = layout.seq_len - tokens.shape[1]
    if padding < 0 or tokens.shape != labels.shape:
        raise ValueError(f"tokens {tokens.shape} and labels {labels.shape} do not fit a layout of {layout.seq_len}")
    positions = layout.positions(cp_rank)
    own_tokens = np.pad(tokens, ((0, 0), (0, padding)))[:, positions]
    own_labels = np.pad(labels, ((0, 0), (0, padding)), constant_values=IGNORE_INDEX)[:, positions]
    return LocalBatch(
        tokens=_moved(own_tokens, device),
        labels=_moved(own_labels[:, label_part.of(len(positions))], device),
        positions=_moved(positions, device),
    )


def _moved(array: IntArray, device: torch.device) -> Tensor:
    """On the device; over pinned memory to a GPU, for which nobody waits then."""
    rows = torch.from_numpy(array)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
