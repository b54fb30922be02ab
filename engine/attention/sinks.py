"""Gradients of learnable attention sinks (GPT-OSS): one logit per query head, without a value, in every softmax.

Where the sinks enter is `merge.finish`; out and lse have them in them from there on. These sinks are parameters, and
have nothing to do with `Mask.sink`, the first tokens that every window sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device.row_blocks import spans
from engine.planning.program.ops import HeadPart

ROWS_PER_PASS = 1024  # bounds the temporaries in the dtype of sums


class SinkGradients:
    """Sinks [H] and their gradient, added up over the rows and heads of one rank's backward pass.

    Attributes:
        sinks: [H], fp32 (float64 for float64 inputs), on the device that computes.
        total: [H]; this rank's share. Over the ranks that share a sequence every row and head is counted once, so
            the sum of the shares is the gradient: it is reduced like that of any other parameter, and not here.
    """

    def __init__(self, sinks: Tensor) -> None:
        self.sinks = sinks
        self.total = torch.zeros_like(sinks)

    def add(self, heads: HeadPart, dout: Tensor, out: Tensor, lse: Tensor) -> None:
        """Add -sum over rows of exp(sink - lse) * rowsum(dout * out).

        Args:
            heads: Which heads the other arguments have.
            dout: [n, h, v_dim], on the device of `sinks` or in host memory, as the others.
            out: [n, h, v_dim] with the sinks in it.
            lse: [n, h] with the sinks in it.
        """
        part = slice(*heads.queries(len(self.sinks)))
        sinks, total = self.sinks[part], self.total[part]
        for rows in spans(lse.shape[0], ROWS_PER_PASS):
            # A device reads host memory in the order of its stream, and the host does not wait for these rows.
            dout_rows, out_rows, lse_rows = (x[rows].to(sinks.device, non_blocking=True) for x in (dout, out, lse))
            delta = (dout_rows.to(sinks.dtype) * out_rows).sum(-1)
            # Of a row without keys no plan needs dout: that of a head exchange may hold anything. Its lse may be -inf.
            without_keys = (out_rows == 0).all(-1)
            total -= (torch.exp(sinks - lse_rows) * delta).masked_fill_(without_keys, 0.0).sum(0)
