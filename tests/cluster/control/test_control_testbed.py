"""A controller over real SSH to real supervisors on a virtual cluster; only the ranks are fakes."""

from __future__ import annotations

from pathlib import Path

from testkit.fake_run import TestbedRun
from testkit.process_table import wait_until_gone
from testkit.testbed_fixture import Testbeds

GONE_S = 15.0


def test_rank_that_fails_on_the_second_node_is_blamed_and_the_next_attempt_completes_with_all_files_here(
    module_testbeds: Testbeds, tmp_path: Path
) -> None:
    one = TestbedRun(module_testbeds.make(nodes=2, rails=1), tmp_path, "raise", local_ranks=2, bad_rank=3)
    first, second = one.testbed.node_names
    try:
        failure = one.lead()[0].failure
        assert failure is not None
        assert (failure.kind, failure.rank, failure.host) == ("exception", 3, second)
        assert "tenth" in failure.message
        assert str(failure.log) == str(one.run.log_path(second, 3))
        one.mend()
        outcome, _ = one.lead()
        assert (outcome.status, outcome.failure, outcome.leftover) == ("completed", None, ())
        assert wait_until_gone(one.run.run_id, GONE_S) == []
    finally:
        one.kill()
    assert one.run.read_state()["attempt"] == 2
    assert [row["step"] for row in one.run.read_metrics()] == [1, 2, 3, 4, 5]
    assert (one.run.path / "attempts/1/metrics.jsonl").exists()
    assert (one.run.read_summary() or {})["attention_preset"] == "ring"
    logs = [sorted(path.name for path in one.run.log_dir(node).glob("rank*.log")) for node in (first, second)]
    assert logs == [["rank0000.log", "rank0001.log"], ["rank0002.log", "rank0003.log"]]
    assert one.run.log_path(second, 3).read_text().endswith("rank 3 in mode ok\n")
