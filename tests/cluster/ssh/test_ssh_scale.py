"""A fleet of 512 nodes, one in twenty faulty, is checked in seconds, in little memory, every faulty one named."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.fleet import start_fleet

from benchmarks.bench_fleet import plan_modes, record_answer, run_verb

NODES = 512
LIMIT_S = 30.0
LIMIT_BYTES = 250e6


@pytest.mark.thorough
def test_512_nodes_are_checked_within_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    modes = plan_modes(NODES)
    faulty = sorted(name for name, mode in modes.items() if mode != "ok")
    assert len(faulty) >= NODES // 20
    with start_fleet(tmp_path / "fleet", modes, record=record_answer()) as fleet:
        turn = run_verb(fleet.config_file, fleet.names, 5.0)
    assert sorted(turn.failed) == faulty
    assert turn.answers == NODES - len(faulty)
    assert turn.elapsed_s < LIMIT_S
    assert turn.peak_rss_bytes < LIMIT_BYTES
