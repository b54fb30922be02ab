"""Counting attention's forward tiles: those of the forward pass, and those that the backward pass runs again."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from torch import Tensor

from engine.attention.library import ContextParallel
from engine.kernels.attention.base import TileGradients, TileKernel, TileResult
from engine.model.llama import LlamaModel
from engine.planning.visibility.mask import Band


@dataclass(frozen=True)
class TileSum:
    """Forward tiles of this rank: how many, their FLOPs (visible pairs only) and seconds inside the kernel."""

    calls: int = 0
    flops: int = 0
    seconds: float = 0.0


class AttentionLog:
    """Forward tiles of one model since `reset`, by the pass in which they ran."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.forward = TileSum()
        self.recomputed = TileSum()
        self._in_forward = True

    def watch(self, model: LlamaModel) -> None:
        """Learn from `model` which pass runs: what runs outside its forward is backward, which calls single layers."""
        model.register_forward_pre_hook(lambda *_: self._enter(forward=True))
        model.register_forward_hook(lambda *_: self._enter(forward=False))

    def add(self, flops: int, seconds: float) -> None:
        """One forward tile has run."""
        name = "forward" if self._in_forward else "recomputed"
        total: TileSum = getattr(self, name)
        setattr(self, name, TileSum(total.calls + 1, total.flops + flops, total.seconds + seconds))

    def _enter(self, *, forward: bool) -> None:
        self._in_forward = forward


class CountingKernel:
    """A kernel that notes every forward tile of another one in a log. The clock is read around the call: CPU only."""

    def __init__(self, kernel: TileKernel, log: AttentionLog) -> None:
        self.name = kernel.name
        self.capabilities = kernel.capabilities
        self._kernel = kernel
        self._log = log

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """As the other kernel's."""
        start = time.perf_counter()
        result = self._kernel.forward(q, k, v, band)
        seconds = time.perf_counter() - start
        pairs = band.area()
        self._log.add(4 * q.shape[1] * q.shape[2] * pairs, seconds)
        return result

    def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
        """As the other kernel's, not counted: every policy runs it once."""
        return self._kernel.backward(grads, q, k, v, band)


def count_attention(attention: ContextParallel, log: AttentionLog) -> ContextParallel:
    """The same attention whose forward tiles are noted in `log`."""
    return attention.with_runtimes(lambda runtime: replace(runtime, kernel=CountingKernel(runtime.kernel, log)))
