"""Shards a batch over the cp ranks: pads it, then takes tokens, labels and positions by the same layout.

    tokens   t0 t1 t2 t3 t4 pad pad pad     labels   t1 t2 t3 t4 t5 -100 -100 -100
    zigzag, cp_size=2      rank 0: t0 t1 | pad pad      rank 1: t2 t3 | t4 pad

The ranks of a tensor-parallel group have the same tokens (each has a slice of the vocabulary) and positions (each has
some of the heads), but divide the labels: a label must count on one rank only.

The data loader shifts labels before sharding, so the label of a block's last token is not lost.
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
    """One rank's rows of a batch, int64 on its device: tokens [B, T], labels [B, T / tp_size], positions [T]."""

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
    """Return the rows of `cp_rank` of whole sequences, [B, N] -> [B, T].

    Args:
        tokens: [B, N] int64.
        labels: [B, N] int64, shifted.
        layout: Assigns positions to cp ranks; positions beyond N get token 0 and label -100.
        cp_rank: Index in the cp group.
        device: Of the result.
        label_part: The part of the rank's rows whose labels are returned.

    Raises:
        ValueError: The sequences are longer than the layout, or tokens and labels differ in shape.
    """
    padding = layout.seq_len - tokens.shape[1]
    if padding < 0 or tokens.shape != labels.shape:
        raise ValueError(f"tokens {tokens.shape} and labels {labels.shape} do not fit a layout of {layout.seq_len}")
    positions = layout.positions(cp_rank)
    local_tokens = np.pad(tokens, ((0, 0), (0, padding)))[:, positions]
    local_labels = np.pad(labels, ((0, 0), (0, padding)), constant_values=IGNORE_INDEX)[:, positions]
    return LocalBatch(
        tokens=_moved(local_tokens, device),
        labels=_moved(local_labels[:, label_part.of(len(positions))], device),
        positions=_moved(positions, device),
    )


def _moved(array: IntArray, device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`; via pinned memory to a GPU, so that the host does not wait."""
    rows = torch.from_numpy(array)
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
