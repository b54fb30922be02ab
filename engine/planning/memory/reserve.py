"""Device memory that no tensor of a step has, and that a GPU must have free besides. Standard library only."""

from __future__ import annotations

from engine.config.settings import ParallelConfig
from engine.planning.methods.methods import channels_of
from engine.planning.methods.presets import AttentionMethod
from engine.planning.schedule.plan import Channel

# What the driver and loaded kernels take before the first tensor; 0.4 to 0.8 GB from A100 to H200.
CUDA_CONTEXT_BYTES = 800 * 2**20
# Blocks of the caching allocator that are free but of the wrong size, and cuBLAS's workspace.
FRAGMENTATION = 0.03


def reserve_bytes(parallel: ParallelConfig, method: AttentionMethod, world_size: int, peak_bytes: int) -> int:
    """Context, communicators and fragmentation of a rank on CUDA whose tensors take `peak_bytes` at most."""
    return CUDA_CONTEXT_BYTES + nccl_bytes(parallel, method, world_size) + round(FRAGMENTATION * peak_bytes)


def nccl_bytes(parallel: ParallelConfig, method: AttentionMethod, world_size: int) -> int:
    """What NCCL takes for the communicators of a rank, by published measurements of which each is one setup.

    Two ranks 544 MiB, more of them 688 MiB (https://github.com/NVIDIA/nccl/issues/964, A100). All-to-all 3.3 GB on 8
    GPUs, since each pair of a node gets up to 32 channels (https://github.com/NVIDIA/nccl/issues/1685, H100): reckoned
    in proportion to a rank's peers, and beyond 8 ranks as 8, for pairs on different nodes get few. A communicator of
    one rank 512 MiB (https://github.com/NVIDIA/nccl/issues/2363, NCCL 2.28): reckoned where the run has but one.
    """
    if world_size == 1:
        return 512 * 2**20
    groups = [world_size, parallel.dp_shard_size * method.cp_size, parallel.dp_replicate_size, parallel.tp_size]
    for channel in channels_of(method):
        inner = channel in (Channel.PAYLOAD_INNER, Channel.GRADIENT_INNER)
        if channel is not Channel.HEADS:
            groups.append(method.ring_inner_size if inner else method.ring_outer_size)
    return sum(map(_group_bytes, groups)) + _all_to_all_bytes(method.head_parallel_size)


def _group_bytes(ranks: int) -> int:
    if ranks == 1:
        return 0
    return (544 if ranks == 2 else 688) * 2**20


def _all_to_all_bytes(ranks: int) -> int:
    return max(_group_bytes(ranks), 3_300_000_000 * min(ranks - 1, 7) // 7)
