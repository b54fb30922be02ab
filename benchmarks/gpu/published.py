"""Published rates of attention kernels on one GPU, D=128, causal unless said, beside which measured ones are shown."""

from __future__ import annotations

from typing import NamedTuple


class PublishedRate(NamedTuple):
    """TFLOP/s of one kernel, backward counted as 2.5 times the forward FLOPs; None where nothing was published."""

    kernel: str
    device: str
    seq_len: int | None
    forward_tflops: float | None
    backward_tflops: float | None
    source: str


PUBLISHED = (
    PublishedRate("cuDNN", "H200", 32768, 688.0, 581.0, "published cuDNN attention figures, bf16, 32K tokens"),
    PublishedRate("FlashAttention-2", "H100", 32768, 366.0, 330.0, "published FlashAttention-2 figures on H100"),
    PublishedRate("FlashAttention-3", "H100", None, 740.0, None, "arXiv:2407.08608: up to so much in FP16, best shape"),
)
