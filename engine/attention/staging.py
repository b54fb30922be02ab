"""Messages of GPU tensors through host memory over gloo: several ranks may share one GPU, which NCCL refuses.

For correctness, not for speed: the host waits for every message where it is posted. No rank waits in vain, because all
start their batches in the same order, by step and channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.transport import Messenger, Parcel, Pending
from engine.planning.program.ops import Channel


class StagedMessenger:
    """Sends device -> host -> gloo -> host -> device, on the stream that is current; `messenger` moves host tensors."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger

    def start(self, channel: Channel, parcels: Sequence[Parcel]) -> list[list[Pending]]:
        """All of it is done on return, as far as the current stream sees."""
        staged = [
            parcel._replace(
                tensors=tuple(
                    x.cpu() if parcel.op == "send" else torch.empty_like(x, device="cpu") for x in parcel.tensors
                )
            )
            for parcel in parcels
        ]
        for pending in self._messenger.start(channel, staged):
            for work in pending:
                work.wait()
        for parcel, host in zip(parcels, staged, strict=True):
            if parcel.op == "recv":
                for target, source in zip(parcel.tensors, host.tensors, strict=True):
                    target.copy_(source)
        return [[] for _ in parcels]
