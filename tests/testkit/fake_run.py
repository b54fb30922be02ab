"""Real runs of several nodes without torch: a controller, links and supervisors lead fake ranks.

`LocalRun` has all of its nodes on this machine, without SSH; `TestbedRun` has those of a virtual cluster.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from cluster.control import ssh_link
from cluster.control.attempt import StopRequests
from cluster.control.controller import ControlOptions, control
from cluster.control.link import LaunchObserver, LaunchOutcome, LaunchTiming, NodeLink, NodeStatus
from cluster.control.runner import open_links, read_run_plan
from cluster.control.ssh_link import LinkTiming
from cluster.env.plan import EnvironmentVariable
from cluster.launch.local import build_local_plan
from cluster.plan import LaunchPlan, NodePlan, with_files
from cluster.testbed.testbed import Testbed
from engine.config.cluster import ClusterConfig, SshConfig
from engine.config.settings import RunConfig, TrainConfig
from engine.runs.folder import RunFolder, create_run, new_run_path, open_run
from testkit import FAKE_PYTHON_PATH, PYTHON_PATH
from testkit.fake_plan import TWO_RANKS, fake_plan, fake_torchrun, node_facts
from testkit.process_table import kill_run
from testkit.waiting import wait_for

LINKS = LinkTiming(first_pause_s=0.2, longest_pause_s=1.0, silence_s=4.0, start_s=60.0)
# As short as a controller lets things be; ranks of fakes end in no time.
HURRIED = LaunchTiming(
    poll_s=0.02, stop_grace_s=0.5, evidence_s=0.2, failure_grace_s=0.5, early_exit_s=0.5, vanish_s=0.5, kill_s=3.0
)
CALM = LaunchTiming(stop_grace_s=3.0)


class Observer:
    """Remembers what it was told; `act` is called at every tick."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act = act
        self.stops: list[tuple[str, float]] = []
        self.notes: list[str] = []
        self.statuses: Sequence[NodeStatus] = ()

    def tick(self) -> None:
        self.act()

    def nodes(self, statuses: Sequence[NodeStatus]) -> None:
        self.statuses = statuses

    def stopping(self, cause: str, grace_s: float) -> None:
        self.stops.append((cause, grace_s))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Led:
    """A run of `plan`, a new one unless it is there: led in this thread or in another one of this process."""

    def __init__(self, plan: LaunchPlan, run: RunFolder | None = None) -> None:
        self.plan = plan
        self.run = run or create_run(Path(plan.run_path), dict(plan.files), world_size=plan.world_size)
        self.observer, self.stop, self._outcome = Observer(), StopRequests(), Future[LaunchOutcome]()

    def links(self) -> Sequence[NodeLink]:
        return open_links(self.plan, self.run)

    def lead(
        self,
        act: Callable[[], None] = lambda: None,
        stop: StopRequests | None = None,
        timing: LaunchTiming = HURRIED,
        *,
        detached: bool = False,
    ) -> tuple[LaunchOutcome, Observer]:
        """Lead it to its end, with `act` at every tick."""
        observer, options = Observer(act), ControlOptions(detached=detached, timing=timing)
        return control(self.plan, self.run, self.links(), observer, stop or StopRequests(), options), observer

    def begin(self, *, start: bool = True, timing: LaunchTiming = CALM) -> Self:
        """Begin to lead it, in a thread."""

        def work() -> None:
            options = ControlOptions(start=start, timing=timing)
            try:
                self._outcome.set_result(control(self.plan, self.run, self.links(), self.observer, self.stop, options))
            except BaseException as error:
                self._outcome.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return self

    def wait(self, timeout_s: float = 200.0) -> LaunchOutcome:
        """Its outcome, or what leading it raised."""
        wait_for(self._outcome.done, self.describe, timeout_s)
        return self._outcome.result()

    def wait_for_step(self, step: int = 3) -> None:
        """Return once rank 0 is that far, which waits for nobody, and every other rank has begun to work."""
        wait_for(lambda: len(self.run.read_metrics()) >= step and self._has_started(), self.describe)

    def _has_started(self) -> bool:
        logs = self.run.path.glob("logs/*/rank*.log")
        return len([log for log in logs if " in mode " in log.read_text()]) == self.plan.world_size

    def describe(self) -> str:
        """What is known, for a test that waits in vain."""
        logs = [path.read_text(errors="replace")[-2000:] for path in self.run.path.rglob("*.log")]
        return "\n".join([*self.observer.notes, str(self.observer.stops), str(self.observer.statuses), *logs])


class LocalRun(Led):
    """A run of fake ranks in `mode` on nodes of these names, of which rank `bad_rank` misbehaves."""

    launcher = "local"

    def __init__(
        self,
        base: Path,
        mode: str,
        *,
        names: Sequence[str] = ("node1", "node2"),
        local_ranks: int = 1,
        bad_rank: int = 1,
        **cluster: Any,
    ) -> None:
        self.names, self.local_ranks = names, local_ranks
        super().__init__(self._plan(new_run_path(base / "runs", "tiny"), mode, bad_rank, cluster))

    @property
    def is_under_way(self) -> bool:
        """Whether one step is left at most, and the launcher knows that all nodes began: before, a start would fail."""
        return len(self.run.read_metrics()) >= 4 and self.run.read_state()["nodes_started_at"] is not None

    @contextlib.contextmanager
    def led_elsewhere(self) -> Iterator[subprocess.Popen[bytes]]:
        """Another process leads it: once it is under way, and until the block ends."""
        launcher = start_leader(self.run.path)
        try:
            wait_for(lambda: self.is_under_way or launcher.poll() is not None, "the ranks")
            assert launcher.poll() is None
            yield launcher
        finally:
            launcher.kill()
            launcher.wait()

    def mend(self) -> None:
        """From the next attempt on no rank misbehaves."""
        nodes = []
        for node in self.plan.nodes:
            variables = [replace(one, value="ok") if one.name == "FAKE_MODE" else one for one in node.environment]
            nodes.append(replace(node, environment=tuple(variables)))
        self.plan = replace(self.plan, nodes=tuple(nodes))

    def folder(self, name: str, path: Path) -> Path:
        """The run folder on a node, when the launcher's is `path`."""
        return path

    def there(self, node: str) -> RunFolder:
        """The run folder on a node, which lies on this machine's disk, too."""
        return RunFolder(self.folder(node, self.run.path))

    def kill(self) -> None:
        kill_run(self.run.run_id)

    def _plan(self, path: Path, mode: str, bad_rank: int, cluster: Mapping[str, Any]) -> LaunchPlan:
        settings = ClusterConfig(ranks_per_node=self.local_ranks, **cluster)
        config = RunConfig(cluster=settings, train=TrainConfig(steps=5, seq_len=64))
        facts = node_facts(self.names[0], cores=2, python=sys.executable, cwd="/", python_path=FAKE_PYTHON_PATH)
        plan = build_local_plan(config, facts, path, module="fake_rank")
        conduct = {"FAKE_MODE": mode, "FAKE_RANK": str(bad_rank), "FAKE_LEAD": str(self.folder(self.names[0], path))}
        nodes = tuple(self._node(plan, number, conduct) for number in range(len(self.names)))
        world_size = self.local_ranks * len(nodes)
        return with_files(replace(plan, nodes=nodes, world_size=world_size, launcher=self.launcher))

    def _node(self, plan: LaunchPlan, number: int, conduct: Mapping[str, str]) -> NodePlan:
        name = self.names[number]
        folder = self.folder(name, Path(plan.run_path))
        logs = f"{folder}/logs/{name}"
        python, torchrun, *words = fake_torchrun(self.local_ranks, f"{folder}/config.yaml")
        # How a rank ended is to be had only until torchrun asks for it: this one is slower than a supervisor ever is.
        more = {"FAKE_POLL_S": "1", **conduct, "BURST_NODE": name, "BURST_RANK_LOGS": logs}
        kept = [variable for variable in plan.nodes[0].environment if variable.name not in more]
        return NodePlan(
            name=name,
            node_rank=number,
            first_rank=number * self.local_ranks,
            local_ranks=self.local_ranks,
            argv=(python, torchrun, f"--node-rank={number}", *words),
            environment=(*kept, *(EnvironmentVariable(key, value, "for the test") for key, value in more.items())),
            cwd="/",
            folder=str(folder),
            log_dir=logs,
        )


class TestbedRun(LocalRun):
    """The same on all nodes of `testbed`, over SSH."""

    __test__ = False
    launcher = "ssh"

    def __init__(self, testbed: Testbed, base: Path, mode: str, **settings: Any) -> None:
        self.testbed = testbed
        ssh = SshConfig(config_file=str(testbed.ssh_config), known_hosts=str(testbed.path / "known_hosts"))
        super().__init__(base, mode, names=testbed.node_names, launcher="ssh", ssh=ssh, **settings)

    def links(self) -> list[NodeLink]:
        return ssh_link.open_links(self.plan, self.run, LINKS)

    def folder(self, name: str, path: Path) -> Path:
        return self.testbed.node(name).home / ".burst" / "runs" / path.name


class LivingRun(Led):
    """A run of two fake ranks here that a process of its own leads, as `burst launch` would, until the block ends."""

    def __init__(self, runs_dir: Path, mode: str = "wait", *flags: str) -> None:
        path = new_run_path(runs_dir, "tiny")
        super().__init__(fake_plan(path, replace(TWO_RANKS, train=TrainConfig(steps=5, seq_len=64))))
        self.controller = start_leader(path, *flags, FAKE_MODE=mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        kill_run(self.run.run_id)

    def wait_steps(self, count: int = 5) -> None:
        """Returns once so many steps are recorded."""
        wait_for(lambda: len(self.run.read_metrics()) >= count, f"{count} steps")

    def kill(self) -> None:
        """SIGKILL for the controller; its ranks go on until their lease ends."""
        self.controller.kill()
        self.controller.wait()


def start_leader(path: Path, *flags: str, **more: str) -> subprocess.Popen[bytes]:
    """A process that leads the run in folder `path`, with `more` in its environment."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, **more}
    command = [sys.executable, "-m", "testkit.fake_run", str(path), *flags]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def main(path: str, *flags: str) -> int:
    """Lead the run in folder `path` from a process of its own, which can be told to stop, and killed."""
    run = open_run(Path(path))
    plan = read_run_plan(run.path)
    links, options = open_links(plan, run), ControlOptions(detached="--detached" in flags, timing=HURRIED)
    with StopRequests().listening() as stop:
        return control(plan, run, links, LaunchObserver(), stop, options).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
