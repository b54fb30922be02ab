"""What is kept free: the driver's context, NCCL's communicators at the sizes that were published, fragments."""

from __future__ import annotations

import pytest

from engine.config.settings import ParallelConfig
from engine.planning.memory.ranks import reserve_bytes
from engine.planning.methods.presets import AttentionMethod

MIB = 2**20


@pytest.mark.parametrize(
    ("world", "ring", "heads", "expected"),
    [
        pytest.param(1, 1, 1, 512 * MIB, id="one rank"),
        pytest.param(2, 1, 1, 2 * 544 * MIB, id="two ranks: the world and the shards"),
        pytest.param(8, 1, 1, 2 * 688 * MIB, id="eight ranks"),
        pytest.param(2, 2, 1, 4 * 544 * MIB, id="a ring of two: payload and gradients besides"),
        pytest.param(8, 1, 8, 2 * 688 * MIB + 3_300_000_000, id="all-to-all on a node"),
        pytest.param(16, 1, 16, 2 * 688 * MIB + 3_300_000_000, id="all-to-all over two nodes"),
        pytest.param(2, 1, 2, 3 * 544 * MIB, id="all-to-all of two is no less than any group of two"),
        pytest.param(8, 4, 2, 4 * 688 * MIB + 544 * MIB, id="rings of four beside all-to-all of two"),
    ],
)
def test_communicators_take_what_was_measured(world: int, ring: int, heads: int, expected: int) -> None:
    method = AttentionMethod("burst", "zigzag", ring, 1, "kv", "float32", "", head_parallel_size=heads)
    parallel = ParallelConfig(dp_shard_size=world // (ring * heads))
    assert reserve_bytes(parallel, method, world, 10**9) == 800 * MIB + expected + 30_000_000  # 3% of the peak
