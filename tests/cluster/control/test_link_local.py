"""The link to this machine, with the real supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.link_rig import begin, led_until, swept
from testkit.supervise_rig import Rig
from testkit.waiting import wait_for

from cluster.agent.messages import Spec
from cluster.control.link import StartRefusedError
from cluster.launch.local import LocalLink


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        made.close()


def open_local(rig: Rig, mode: str, **changes: Any) -> tuple[LocalLink, Spec]:
    spec = rig.spec(mode, folder=str(rig.folder), **changes)
    return LocalLink(Path(spec["folder"]), spec["node"]), Spec(**spec)


def test_a_run_is_started_followed_and_stopped(rig):
    link, spec = open_local(rig, "polite", lease_s=30.0)
    assert (link.poll().phase, link.poll().outcome) == ("none", None)
    begin(link, spec)
    link.follow()
    led_until(link, lambda seen: seen.phase == "running" and len(seen.supervisor.get("ranks", {})) == 2)
    assert not link.poll().is_synced
    link.stop("Ctrl-C", 10.0)
    outcome = led_until(link, lambda seen: seen.is_synced and seen.outcome)
    link.close()

    assert (outcome["cause"], outcome["stop_cause"]) == ("stop", "Ctrl-C")
    assert link.poll().phase == "ended"
    assert rig.processes() == []


def test_a_second_start_of_the_same_run_is_refused_while_the_first_lives(rig):
    link, spec = open_local(rig, "wait")
    begin(link, spec)
    with pytest.raises(StartRefusedError) as caught:
        begin(link, spec)
    assert caught.value.kind == "exists"

    assert swept(link) == ()
    assert rig.processes() == []
    begin(link, spec)  # another attempt
    assert swept(link) == ()


def test_a_spec_that_makes_no_sense_is_refused_in_words(rig):
    link, spec = open_local(rig, "wait", cwd="nowhere")
    with pytest.raises(StartRefusedError, match="cwd is no absolute path") as caught:
        begin(link, spec)

    assert caught.value.kind == "command"


def test_ranks_are_swept_when_their_supervisor_was_killed(rig):
    link, spec = open_local(rig, "wait")
    begin(link, spec)
    wait_for(lambda: len(link.poll().supervisor.get("ranks", {})) == 2, "the ranks")
    os.kill(link.poll().supervisor["pid"], signal.SIGKILL)
    wait_for(lambda: link.poll().phase == "lost", "the loss")

    assert swept(link) == ()
    assert rig.processes() == []


def test_a_folder_that_is_gone_is_a_problem_in_words_and_raises_nothing(tmp_path):
    link = LocalLink(tmp_path / "gone", "node1")
    for ask in (link.beat, lambda: link.stop("x", 0.0), lambda: link.request_stacks("n")):
        ask()
        assert "No such file" in (link.poll().problem or "")

    assert link.poll().phase == "none"
    assert swept(link) == ()
