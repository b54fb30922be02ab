"""Messages of GPU tensors through host memory over gloo: several ranks may share one GPU, which NCCL refuses.

For correctness, not for speed: the host waits for every message where it is posted. No rank waits in vain, because all
start their batches in the same order, by step and channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.transport import Messenger, P2POp, Pending
from engine.planning.program.ops import Channel


class StagedMessenger:
    """Sends device -> host -> gloo -> host -> device, on the stream that is current; `messenger` moves host tensors."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger

    def start(self, channel: Channel, ops: Sequence[P2POp]) -> list[list[Pending]]:
        """All of it is done on return, as far as the current stream sees."""
        staged = [
            op._replace(
                tensors=tuple(x.cpu() if op.op == "send" else torch.empty_like(x, device="cpu") for x in op.tensors)
            )
            for op in ops
        ]
        for pending in self._messenger.start(channel, staged):
            for work in pending:
                work.wait()
        for op, host in zip(ops, staged, strict=True):
            if op.op == "recv":
                for target, source in zip(op.tensors, host.tensors, strict=True):
                    target.copy_(source)
        return [[] for _ in ops]
