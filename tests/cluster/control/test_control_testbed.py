"""A controller over real SSH to real supervisors on a virtual cluster; only the ranks are fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testkit.fake_run import TestbedRun
from testkit.process_table import wait_until_gone
from testkit.testbed_fixture import Testbeds

from cluster.testbed.faults import clear_faults
from cluster.testbed.testbed import Testbed

END_S = 300.0  # on a machine that is busy with other tests
GONE_S = 15.0


@pytest.fixture(scope="module")
def testbed(module_testbeds: Testbeds) -> Testbed:
    """Two nodes that get faults."""
    return module_testbeds.make(nodes=2, rails=1)


@pytest.fixture
def start(testbed: Testbed, tmp_path: Path) -> Iterator[Callable[..., TestbedRun]]:
    """Makes runs; afterwards nothing of them may be left on any node."""
    made: list[TestbedRun] = []

    def make(mode: str, **settings: object) -> TestbedRun:
        made.append(TestbedRun(testbed, tmp_path, mode, local_ranks=2, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for node in testbed.node_names:
        clear_faults(testbed, node)
    left = [process for one in made for process in wait_until_gone(one.run.run_id, GONE_S)]
    for one in made:
        one.kill()
    assert left == []


def test_rank_that_fails_on_the_second_node_is_blamed_and_the_next_attempt_completes_with_all_files_here(
    start: Callable[..., TestbedRun],
) -> None:
    one = start("raise", bad_rank=3)
    first, second = one.testbed.node_names
    failure = one.lead()[0].failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.host) == ("exception", 3, second)
    assert "tenth" in failure.message
    assert str(failure.log) == str(one.run.log_path(second, 3))
    one.mend()
    outcome, _ = one.lead()
    assert (outcome.status, outcome.failure, outcome.leftover) == ("completed", None, ())
    assert one.run.read_state()["attempt"] == 2
    assert [row["step"] for row in one.run.read_metrics()] == [1, 2, 3, 4, 5]
    assert (one.run.path / "attempts/1/metrics.jsonl").exists()
    assert (one.run.read_summary() or {})["attention_preset"] == "ring"
    logs = [sorted(path.name for path in one.run.log_dir(node).glob("rank*.log")) for node in (first, second)]
    assert logs == [["rank0000.log", "rank0001.log"], ["rank0002.log", "rank0003.log"]]
    assert one.run.log_path(second, 3).read_text().endswith("rank 3 in mode ok\n")
