"""A fleet of 512 nodes, one in twenty faulty, is probed in seconds, in little memory, every faulty one named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleet import FENCE, start_fleet

from benchmarks.bench_fleet import GROUPS, plan_modes, run_burst
from cluster.probe.script import build_script

NODES = 512
LIMIT_S = 30.0
LIMIT_BYTES = 250e6


def recorded_answer() -> bytes:
    """A healthy node's answer to every section of the probe."""
    fence = FENCE.decode()
    names = re.findall(r"^section (\S+)", build_script(GROUPS, fence).decode(), flags=re.MULTILINE)
    blocks = [f"\n{fence} begin {name} 1.00\n{'line of output' * 10}\n{fence} end {name} 0 1.01\n" for name in names]
    return "".join([*blocks, f"\n{fence} done\n"]).encode()


@pytest.mark.slow
def test_512_nodes_are_probed_within_their_limits(tmp_path: Path) -> None:
    modes = plan_modes(NODES)
    faulty = sorted(name for name, mode in modes.items() if mode != "ok")
    assert len(faulty) >= NODES // 20
    with start_fleet(tmp_path, modes, record=recorded_answer()) as fleet:
        turn = run_burst(fleet.config_file, fleet.names, 5.0)
    assert sorted(turn.failed) == faulty
    assert turn.answers == NODES - len(faulty)
    assert turn.elapsed_s < LIMIT_S
    assert turn.peak_rss_bytes < LIMIT_BYTES
