from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from cluster.control.judge import advice
from cluster.failure import Death, Failure, KillFacts, Kind, NodeEvidence, find_failure, first_death
from engine.config.settings import RunConfig

UNKNOWN = KillFacts()
RUN = Path("/runs/tiny/20260101-000000-abcdef")
TORCHRUN_LOG = """\
W1120 09:47:27.753000 6751 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 6755 closing signal SIGTERM
E1120 09:47:27.761000 6751 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 6756) of binary: /venv/bin/python
Traceback (most recent call last):
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6755)  (SIGTERM)
"""  # noqa: E501 - as torchrun wrote it


def error(rank: int, kind: str = "exception", **more: Any) -> dict[str, Any]:
    return {"rank": rank, "kind": kind, "type": "ValueError", "message": "bad", "exit_code": 1, "step": 4, **more}


def find(errors: list[dict[str, Any]], death: Death | None = None, code: int = 1, kill: KillFacts = UNKNOWN) -> Failure:
    timed = [{"time_ns": number, **error} for number, error in enumerate(errors)]
    return find_failure([NodeEvidence("", timed, death, (), code, kill)])


def test_first_death_is_read_from_the_log_of_torchrun() -> None:
    assert first_death(TORCHRUN_LOG) == Death(rank=1, exit_code=-9, pid=6756)
    assert first_death("all is well") is None


def test_earliest_error_of_a_rank_is_the_failure() -> None:
    failure = find([error(2, step=7), error(0)], Death(2, 1))
    assert (failure.rank, failure.step, failure.type, failure.status) == (2, 7, "ValueError", "failed")


@pytest.mark.parametrize("code", [-9, -11, -7, -4])
def test_rank_killed_by_a_signal_is_the_cause_and_the_errors_of_others_its_echo(code: int) -> None:
    failure = find([error(0, "peer_lost"), error(2)], Death(1, code))
    assert (failure.rank, failure.kind) == (1, "signal")


def test_loss_of_a_peer_is_blamed_only_when_nothing_else_is() -> None:
    assert find([error(0, "peer_lost"), error(1)]).rank == 1
    assert find([error(0, "peer_lost")]).kind == "peer_lost"
    assert find([error(0, "peer_lost")], Death(1, 3)).rank == 1


def test_abort_may_be_an_echo_of_an_error_elsewhere() -> None:
    assert find([error(0)], Death(1, -6)).rank == 0
    assert find([], Death(1, -6)).signal == "SIGABRT"


def test_death_of_a_rank_that_explained_itself_is_its_error() -> None:
    failure = find([error(1, "oom")], Death(1, 1))
    assert (failure.kind, failure.status) == ("oom", "oom")


@pytest.mark.parametrize(("evidence", "status"), [("the count rose", "oom"), (None, "failed")])
@pytest.mark.parametrize("death", [Death(0, -9), None])
def test_sigkill_is_out_of_memory_only_when_the_kernel_says_so(
    death: Death | None, evidence: str | None, status: str
) -> None:
    failure = find([], death, -9, KillFacts(evidence, "Perhaps memory.", {"peak_bytes": 5}))
    assert (failure.status, failure.signal) == (status, "SIGKILL")
    assert (evidence or "Perhaps memory.") in failure.message
    assert failure.memory == ({"peak_bytes": 5} if evidence else None)


def test_kill_facts_say_nothing_about_other_deaths() -> None:
    kill = KillFacts("the count rose", "Perhaps memory.", {})
    assert find([error(1)], Death(1, 1), kill=kill).kind == "exception"
    assert find([], Death(1, -11), kill=kill).kind == "signal"


def test_what_a_rank_measured_when_memory_ran_out_is_kept() -> None:
    assert find([error(1, "oom", memory={"where": "device"})]).memory == {"where": "device"}


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure("oom", "T", "m", memory={"where": "device"}), "memory.optimizer_store=host"),
        (Failure("oom", "T", "m"), "cluster.ranks_per_node"),
        (Failure("signal", "SIGKILL", "m", signal="SIGKILL"), "If `dmesg` shows"),
        (Failure("node_lost", "T", "m", host="n2"), f"`burst resume {RUN.name} --hosts NODES`"),
    ],
)
def test_advice_names_the_settings_that_help(failure: Failure, words: str) -> None:
    assert words in advice(failure, RUN, RunConfig())


def test_configuration_error_keeps_its_exit_code() -> None:
    assert find([error(0, "config", exit_code=2)]).exit_code == 2


@pytest.mark.parametrize(("code", "text"), [(-9, "signal 9"), (1, "exit code 1"), (0, "before training was complete")])
def test_without_any_trace_torchrun_itself_is_named(code: int, text: str) -> None:
    failure = find([], None, code)
    assert (failure.kind, failure.rank) == ("launcher", None)
    assert text in failure.message


def test_rank_that_torchrun_reaped_before_anybody_saw_its_code_ended_as_torchrun_did() -> None:
    left = NodeEvidence("n2", vanished=[Death(1, None, at_ns=5)], exit_code=0)
    others = NodeEvidence("n1", [error(0, "peer_lost", is_echo=True)], exit_code=1)
    failure = find_failure([others, left])
    assert (failure.kind, failure.type, failure.rank, failure.host) == ("exit", "EarlyExit", 1, "n2")


@pytest.mark.parametrize("code", [-15, 130, 143])
def test_rank_that_was_told_to_end_is_blamed_only_when_nobody_else_is(code: int) -> None:
    told = Death(0, code, at_ns=2)
    assert find_failure([NodeEvidence("", (), None, (Death(1, None, at_ns=1), told), 1)]).rank == 1
    assert find_failure([NodeEvidence("", (), None, (told,), 1)]).rank == 0


def test_strange_exit_codes_are_no_signal() -> None:
    assert Death(0, -200).signal is None
    assert find([], Death(0, -200)).kind == "exit"


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_of_failure_has_advice(kind: Any) -> None:
    assert len(advice(Failure(kind, "T", "m"), RUN, RunConfig())) > 20
