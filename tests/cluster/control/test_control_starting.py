"""Who is asked to begin, and that nobody is asked behind the back of one who halts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from control_fakes import World

from cluster.control.starting import Starter


class SlowlyNamed:
    """A link that is just being taken up: its name is asked for, and comes once somebody is about to halt."""

    def __init__(self) -> None:
        self.is_taken, self.may_go_on, self.has_begun = threading.Event(), threading.Event(), threading.Event()

    @property
    def node(self) -> str:
        self.is_taken.set()
        assert self.may_go_on.wait(200)
        return "n1"

    def start(self, spec: Any) -> None:
        self.has_begun.set()


def test_who_halts_knows_everybody_who_was_or_will_be_asked(tmp_path: Path) -> None:
    link: Any = SlowlyNamed()
    starter = Starter([link], [None])  # type: ignore[list-item]
    assert link.is_taken.wait(200)
    threading.Timer(0.2, link.may_go_on.set).start()
    starter.halt()
    asked = set(starter.asked)
    link.may_go_on.set()
    assert link.has_begun.wait(200)
    assert asked == {"n1"}


def test_after_a_halt_nobody_is_asked(tmp_path: Path) -> None:
    world = World(tmp_path, ("n1", "n2", "n3"))
    world.links[0].gate = threading.Event()
    starter = Starter(world.links, [None] * 3, width=1)  # type: ignore[list-item, arg-type]
    assert world.links[0].is_asked.wait(200)
    starter.halt()
    world.links[0].gate.set()
    while not starter.is_done:
        pass
    assert (starter.asked, starter.poll()) == ({"n1"}, ["n1"])
