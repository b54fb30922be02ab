"""A run that fails begins again by itself: as often as it may without progress, and not where that is futile."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.clock import Clock
from testkit.fake_plan import node_facts

from burst_cli.launch.launching import lead_attempts, renewed_plan, with_spares
from burst_cli.launch.prepare import PreparedLaunch
from burst_cli.options import LaunchRequest
from burst_cli.runs.failure import failure_block
from cluster.checks.launch import NodeProblem, UnfitNodesError
from cluster.control.attempt import StopRequests, begin_attempt, finish
from cluster.control.controller import ControlOptions
from cluster.control.link import LaunchObserver, LaunchOutcome
from cluster.errors import ClusterError
from cluster.failure import Failure
from cluster.launch.local import build_local_plan
from cluster.plan import LaunchPlan
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder, create_run, new_run_path


class Story(LaunchObserver):
    """A run whose attempts end as `ends` tells, one after the other, each with so many steps saved; what is said.

    deaf: so often the nodes cannot be asked. stops: requests to stop.
    """

    def __init__(self, base: Path, *ends: tuple[str | None, int], allowed: int = 2, deaf: int = 0, stops: int = 0):
        config = RunConfig(cluster=ClusterConfig(max_restarts=allowed))
        self.plan = build_local_plan(config, node_facts("here"), new_run_path(base, "tiny"))
        self.run = create_run(Path(self.plan.run_path), dict(self.plan.files))
        self.ends, self.deaf, self.stop, self.clock = list(ends), deaf, StopRequests(), Clock(0.0)
        self.stop.count = stops
        self.starts: list[bool] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def lead(self, plan: LaunchPlan, options: ControlOptions) -> LaunchOutcome:
        self.starts.append(options.start)
        kind, step = self.ends.pop(0)
        if step:
            self.run.append_event("checkpoint", step=step)
        if kind is None:
            return LaunchOutcome("completed", 0)
        return LaunchOutcome("oom" if kind == "oom" else "failed", 1, Failure(kind, "Bad", "it failed"))

    def ask(self) -> None:
        self.stop.count += 1

    def renew(self, plan: LaunchPlan, run: RunFolder) -> LaunchPlan:
        if self.deaf:
            self.deaf -= 1
            raise ClusterError("n2 does not answer")
        return renewed_plan(plan, run)

    def tell(self) -> tuple[str, int]:
        """(how it ends, after how many attempts)."""
        watchers = (self, self.stop)
        outcome = lead_attempts(self.plan, self.run, watchers, self.lead, ControlOptions(clock=self.clock), self.renew)
        return outcome.status, len(self.starts)


def test_a_run_that_fails_begins_again_until_it_is_complete(tmp_path: Path) -> None:
    story = Story(tmp_path, ("signal", 0), ("hang", 0), (None, 0))
    assert (story.tell(), story.starts) == (("completed", 3), [True] * 3)
    assert 6.0 <= story.clock.now < 7.0  # two seconds, then four
    assert story.notes == [
        "signal: restart 1 of 2 without progress, from the beginning",
        "hang: restart 2 of 2 without progress, from the beginning",
    ]
    stopped = Story(tmp_path, ("signal", 0))
    stopped.clock.after(1.5, stopped.ask)
    assert (stopped.tell(), stopped.clock.now < 1.7) == (("failed", 1), True)
    # Restarts are counted from the last progress.
    story = Story(tmp_path, *(("signal", step) for step in (0, 0, 10, 10, 20, 20, 20, 20)))
    assert story.tell() == ("failed", 7)  # the last one of which there were two without a further checkpoint
    for place, step in ((2, 10), (4, 20)):  # after progress none of them is "without progress"
        first, second = story.notes[place : place + 2]
        assert first.startswith(f"signal: restart from the checkpoint of step {step};"), first
        assert "without progress" not in first
        assert second == f"signal: restart 2 of 2 without progress, from the checkpoint of step {step}"


def test_nothing_begins_again_where_that_is_futile_or_not_wanted(tmp_path: Path) -> None:
    for ends, settings, told in [
        *(([(kind, 0)], {}, ("failed", 1)) for kind in ("config", "user", "start")),  # another would end of it as well
        ([("oom", 0)], {}, ("oom", 1)),
        ([("signal", 10)], {"allowed": 0}, ("failed", 1)),  # it is not wanted
        ([("signal", 10)], {"stops": 1}, ("failed", 1)),
        ([("node_lost", 0), (None, 0)], {"deaf": 1}, ("completed", 2)),  # nodes are asked again
        ([("node_lost", 0)], {"deaf": 2}, ("failed", 1)),
    ]:
        story = Story(tmp_path, *ends, **settings)
        assert story.tell() == told
        deaf = [note for note in story.notes if "restart" not in note]
        assert deaf == ["the nodes cannot take it up: n2 does not answer"] * settings.get("deaf", 0)


def test_spare_nodes_take_the_place_of_those_that_are_not_fit_where_nodes_are_reached_by_ssh(tmp_path: Path) -> None:
    unfit = set[str]()

    def prepare(names: tuple[str, ...]) -> PreparedLaunch:
        if found := tuple(name for name in names if name in unfit):
            raise UnfitNodesError([NodeProblem(found, "it does not answer")])
        return PreparedLaunch(None, None, names, None)  # type: ignore[arg-type]

    for dead, spares, taken in [
        ("", "n3", "n1 n2"),
        ("n2", "n3", "n1 n3"),
        ("n2 n3", "n3 n4", "n1 n4"),
        ("n1 n2", "n3 n4", "n3 n4"),
        ("n2", "n1 n3", "n1 n3"),
        ("n2", "", "it does not answer"),
        ("n1 n2", "n3", "it does not answer"),
    ]:
        unfit.clear()
        unfit.update(dead.split())
        try:
            found = " ".join(with_spares(prepare, ("n1", "n2"), spares.split()).overrides)
        except UnfitNodesError as error:
            found = str(error).rpartition(": ")[2]
        assert found == taken
    story = Story(tmp_path)
    with pytest.raises(ConfigError, match="takes no --hosts"):
        renewed_plan(story.plan, story.run, LaunchRequest(hosts="n1"))


def test_a_failure_block_shows_the_last_lines_of_its_own_attempt(tmp_path: Path) -> None:
    story = Story(tmp_path)
    log = story.run.log_path("here", 0)
    log.parent.mkdir(parents=True)
    failure = Failure("exception", "ValueError", "bad", 0, "here", log=str(log))
    for attempt in ("first", "second"):
        begin_attempt(story.plan, story.run, None)
        with log.open("a") as file:
            file.write(f"traceback of the {attempt}\n")
        finish(story.run, LaunchOutcome("failed", 1, failure))
    text = failure_block(story.run, failure).plain
    assert ["traceback of the second" in text, "traceback of the first" in text] == [True, False]
