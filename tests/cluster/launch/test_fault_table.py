"""Faults of ranks: every one is blamed, on the right rank and node, and everything stops. docs/faults.md says so, too.

All runs are led at the same time, on nodes that are names of this machine; supervisors, signals and files are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from testkit import ROOT
from testkit.fake_run import LocalRun
from testkit.fault_rig import confirm
from testkit.fault_table import HANG_S, INJURIES, Row, document
from testkit.machine_clock import machine_time
from testkit.process_table import wait_until_gone

from engine.runs.folder import RunFolder
from engine.training.rank.faults import STRIKES

AT_ONCE = 4
HANG_TIMEOUT_S = 1.5
GONE_S = 5.0


@dataclass(frozen=True)
class Ended:
    """A run that was led to its end, and how long that took from the fault on (less than from the start on)."""

    run: RunFolder
    exit_code: int
    took_s: float


def lead(base: Path, row: Row) -> Ended:
    one = LocalRun(base / row.do, row.do, bad_rank=0 if row.do == "disk" else 1, hang_timeout_s=HANG_TIMEOUT_S)
    begin: list[float] = []

    def see_fault() -> None:
        if not begin and len(one.run.read_metrics()) >= 2:
            begin.append(machine_time())
        assert not begin or machine_time() - begin[0] < HANG_S, "it goes on"

    try:
        outcome, _ = one.lead(see_fault)
        took_s = machine_time() - begin[0]
        left = wait_until_gone(one.run.run_id, GONE_S)
        assert left == []
    finally:
        one.kill()
    return Ended(one.run, outcome.exit_code, took_s)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    base = tmp_path_factory.mktemp("faults")
    slowest_first = sorted(INJURIES, key=lambda row: row.limit_s != HANG_S)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {row.do: pool.submit(lead, base, row) for row in slowest_first}


@pytest.mark.parametrize("row", INJURIES, ids=lambda row: row.do)
def test_injured_rank_is_blamed_and_everything_stops(ended: dict[str, Future[Ended]], row: Row) -> None:
    seen = ended[row.do].result()
    confirm(row, seen.run, seen.exit_code, ("node1", "node2"))
    if row.limit_s is not None:
        assert seen.took_s <= row.limit_s
    if row.limit_s == HANG_S:
        stacks = list(seen.run.path.glob("logs/*/rank*.stacks"))
        assert any("File " in path.read_text(errors="replace") for path in stacks), stacks


def test_every_fault_that_a_trainer_can_be_told_to_have_is_in_the_table() -> None:
    assert {row.do for row in INJURIES} == {*STRIKES, "nan", "disk", "slow"}


def test_document_of_faults_shows_the_rows_of_the_table() -> None:
    assert (ROOT / "docs/faults.md").read_text() == document()
