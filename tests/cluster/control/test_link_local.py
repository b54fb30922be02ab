"""The link to this machine, with the real supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit.link_rig import begin, led_until, swept
from testkit.supervise_rig import Rig

from cluster.agent.messages import Spec
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


def test_a_folder_that_is_gone_is_a_problem_in_words_and_raises_nothing(tmp_path):
    link = LocalLink(tmp_path / "gone", "node1")
    for ask in (link.beat, lambda: link.stop("x", 0.0), lambda: link.request_stacks("n")):
        ask()
        assert "No such file" in (link.poll().problem or "")

    assert link.poll().phase == "none"
    assert swept(link) == ()
