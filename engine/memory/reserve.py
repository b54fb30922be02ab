"""Device memory that no tensor of a step has, and that a GPU must have free besides. Standard library only."""

from __future__ import annotations

from engine.attention.methods import channels_of
from engine.attention.presets import AttentionMethod
from engine.config import ParallelConfig

# What the driver and loaded kernels take before the first tensor; 0.4 to 0.8 GB from A100 to H200.
CUDA_CONTEXT_BYTES = 800 * 2**20
# NCCL's buffers: 4 MiB (NCCL_BUFFSIZE) for each direction of each of up to 32 channels of a communicator.
NCCL_BYTES_PER_COMMUNICATOR = 256 * 2**20
# Blocks of the caching allocator that are free but of the wrong size, and cuBLAS's workspace.
FRAGMENTATION = 0.03


def reserve_bytes(parallel: ParallelConfig, method: AttentionMethod, world_size: int, peak_bytes: int) -> int:
    """Context, communicators and fragmentation of a rank on CUDA whose tensors take `peak_bytes` at most."""
    groups = (
        world_size,
        parallel.dp_shard_size * method.cp_size,
        parallel.dp_replicate_size,
        parallel.tp_size,
    )
    communicators = len(channels_of(method)) + sum(size > 1 for size in groups)
    return CUDA_CONTEXT_BYTES + communicators * NCCL_BYTES_PER_COMMUNICATOR + round(FRAGMENTATION * peak_bytes)
