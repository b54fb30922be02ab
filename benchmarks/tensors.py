"""What lives between two training steps, for trackers of live tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def local_tensors(model: Any, optimizer: Any) -> Iterator[Tensor]:
    """Parameters, buffers and optimizer state as ordinary tensors: this rank's part of them."""
    state = (value for values in optimizer.state.values() for value in values.values())
    for tensor in (*model.parameters(), *model.buffers(), *state):
        if isinstance(tensor, torch.Tensor):
            yield tensor.to_local() if hasattr(tensor, "to_local") else tensor
