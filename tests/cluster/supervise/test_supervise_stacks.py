"""Stacks and flight records of ranks that listen, that do not yet, and that cannot answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.supervise_rig import Rig, kill
from testkit.waiting import wait_for

from cluster.agent.folder import read_json, request_stacks
from cluster.agent.health import ANSWER_S


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def ask(rig: Rig, nonce: str) -> dict[str, Any]:
    """What stacks_done.json says of the ranks."""
    request_stacks(str(rig.folder / "alpha"), rig.name(), nonce)
    done = rig.files().stacks_done
    answer = wait_for(lambda: (read_json(done) or {}).get("nonce") == nonce and read_json(done), "the answer")
    return dict(answer["ranks"])


def stacks(rig: Rig, rank: int) -> str:
    return Path(rig.files().log_dir, f"rank{rank:04d}.stacks").read_text()


def test_ranks_that_listen_leave_their_stacks(rig: Rig) -> None:
    rig.start("listens")
    wait_for(lambda: all("# rank" in stacks(rig, rank) for rank in (0, 1)), "the ranks to listen")
    answer = ask(rig, "first")
    assert [answer[rank]["answered"] for rank in ("0", "1")] == [True, True]
    assert {rank: answer[rank]["pid"] for rank in answer} == rig.ranks()
    assert "in main" in stacks(rig, 1)
    assert Path(rig.files().flight_request).read_text().strip() == "first"
    length = len(stacks(rig, 1))
    ask(rig, "second")
    assert len(stacks(rig, 1)) > length


def test_rank_that_does_not_listen_yet_is_left_alone(rig: Rig) -> None:
    rig.start("wait")  # its file of stacks is there, but SIGUSR1 would kill it
    Path(rig.files().stacks).write_text("{")
    time.sleep(0.5)  # a damaged request was seen, and is none
    answer = ask(rig, "nonce")
    assert [answer[rank]["answered"] for rank in ("0", "1")] == [False, False]
    assert rig.status()["supervisor"]["deaths"] == []


def test_stopped_rank_is_reported_and_does_not_hold_up_the_rest(rig: Rig) -> None:
    rig.start("listens")
    wait_for(lambda: all("# rank" in stacks(rig, rank) for rank in (0, 1)), "the ranks to listen")
    kill(rig.ranks()["0"], signal.SIGSTOP)
    answer = ask(rig, "nonce")
    assert (answer["0"]["state"], answer["0"]["answered"]) == ("T", False)
    assert answer["1"]["answered"]


def test_flight_records_of_this_request_are_waited_for(rig: Rig) -> None:
    rig.start("listens")
    wait_for(lambda: all("# rank" in stacks(rig, rank) for rank in (0, 1)), "the ranks to listen")
    for rank in (0, 1):
        Path(rig.files().log_dir, f"rank{rank:04d}.flight.json").write_text('{"nonce": "earlier"}')
    begin = time.monotonic()
    assert ask(rig, "nonce")["0"]["answered"]
    assert time.monotonic() - begin > ANSWER_S - 0.2
