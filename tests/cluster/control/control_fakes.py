"""A controller's world without machines: nodes that do what a test says, and time that passes when nobody waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from testkit.clock import Clock
from testkit.fake_plan import node_facts
from testkit.fake_run import Observer

from cluster.agent.messages import Spec
from cluster.control.attempt import StopRequests
from cluster.control.controller import ControlOptions, control
from cluster.control.link import LaunchOutcome, LaunchTiming, NodeLink, NodeStatus, Phase, StartRefusedError
from cluster.failure import Failure
from cluster.launch.local import build_local_plan
from cluster.plan import with_files
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig, TrainConfig
from engine.runs.files import append_json_line, replace_json
from engine.runs.folder import RunFolder, create_run, new_run_path

STEPS = 10
Act = Callable[["World"], object]
Scene = tuple[float, Act]  # the second in which something happens
TIMING = LaunchTiming()


@dataclass
class FakeLink(NodeLink):
    """One node. obeys_s: how long it takes to end once it is asked to; None: only when killed; deaf: not even then.

    is_held: it does not answer to a start until `let_go`. mute: ranks that write no stacks although they are asked.
    """

    node: str
    run: RunFolder
    clock: Clock
    obeys_s: float | None = 0.2
    deaf: bool = False
    refusal: StartRefusedError | None = None
    has_started: bool = False
    is_held: bool = False
    phase: Phase = "none"
    outcome: dict[str, Any] | None = None
    supervisor: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] | None = None
    is_silent: bool = False
    heard_at: float = 0.0
    is_synced: bool = True
    ahead_ns: int = 0
    states: Mapping[str, str] = field(default_factory=dict)
    mute: frozenset[str] = frozenset()
    # What it was asked for.
    specs: list[Spec] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)
    stops: list[tuple[float, str, float]] = field(default_factory=list)
    nonces: list[str] = field(default_factory=list)
    sweeps: int = 0
    is_followed: bool = False
    is_closed: bool = False

    def start(self, spec: Spec) -> None:
        self.specs.append(spec)
        if not self.is_held:
            self.let_go()

    def let_go(self) -> None:
        """Answer to the start."""
        self.is_held, self.has_started = False, self.refusal is None
        self.phase = "running" if self.has_started else "none"

    def follow(self) -> None:
        self.is_followed = True

    def poll(self) -> NodeStatus:
        self.heard_at = self.heard_at if self.is_silent else self.clock.now
        return NodeStatus(
            self.node,
            self.phase,
            self.outcome,
            self.health,
            heard_s=self.clock.now - self.heard_at,
            is_synced=self.is_synced and self.outcome is not None,
            problem="timed out" if self.is_silent else None,
            clock_offset_ns=self.ahead_ns,
            supervisor=self.supervisor,
            has_started=self.has_started,
            refusal=None if self.is_held or not self.specs else self.refusal,
            swept=() if self.sweeps else None,
        )

    def beat(self) -> None:
        self.beats.append(self.clock.now)

    def stop(self, cause: str, grace_s: float) -> None:
        self.stops.append((self.clock.now, cause, grace_s))
        after_s = grace_s if self.obeys_s is None else min(self.obeys_s, grace_s)
        at_ns = self.clock.time_ns()
        if not self.deaf and not self.is_silent:
            self.clock.after(after_s, lambda: self.end(None, "stop", stop_cause=cause, stop_at_ns=at_ns))

    def request_stacks(self, nonce: str) -> None:
        self.nonces.append(nonce)
        facts = {
            rank: {"pid": 1, "state": state, "answered": rank not in self.mute} for rank, state in self.states.items()
        }
        if not self.is_silent:
            self.clock.after(1.0, lambda: self.leave("stacks_done.json", {"nonce": nonce, "ranks": facts}))

    def sweep(self) -> None:
        self.sweeps += 1

    def close(self) -> None:
        self.is_closed = True

    # --- what a test makes the node do -------------------------------------------------------------------------------

    def end(self, exit_code: int | None, cause: str = "exit", **more: Any) -> None:
        """The node's part ends, unless it has."""
        if self.outcome is None:
            deaths = self.supervisor.get("deaths", [])
            self.outcome = {"exit_code": exit_code, "cause": cause, "deaths": deaths, "leftover_pids": [], **more}
            self.phase = "ended"

    def lose_rank(self, rank: int, exit_code: int | None) -> None:
        """The supervisor sees a rank end."""
        death = {"rank": rank, "pid": 100 + rank, "exit_code": exit_code, "at_ns": self.clock.time_ns()}
        self.supervisor = {**self.supervisor, "deaths": [*self.supervisor.get("deaths", []), death]}

    def torchrun_says(self, local_rank: int, exit_code: int) -> None:
        """torchrun names the rank that failed first."""
        self.log(f"failed (exitcode: {exit_code}) local_rank: {local_rank} (pid: 100) of binary: python\n")

    def log(self, text: str) -> None:
        """So torchrun says."""
        self.run.log_dir(self.node).mkdir(parents=True, exist_ok=True)
        with (self.run.log_dir(self.node) / "torchrun.log").open("a") as file:
            file.write(text)

    def rank_error(self, rank: int, kind: str = "exception", **more: Any) -> None:
        """A rank leaves its error."""
        path = self.run.log_path(self.node, rank).with_suffix(".error.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        error = {"rank": rank, "kind": kind, "type": "ValueError", "message": "bad", "exit_code": 1}
        replace_json(path, {**error, "time_ns": self.clock.time_ns(), **more})

    def leave(self, name: str, document: Mapping[str, Any]) -> None:
        """A file of nodes/<node>/."""
        path = self.run.path / "nodes" / self.node / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))


def node(number: int, deed: str, *words: Any, **facts: Any) -> Act:
    """A node does what this method of `FakeLink` does."""
    return lambda world: getattr(world.links[number], deed)(*words, **facts)


def put(*numbers: int, **facts: Any) -> Act:
    """Nodes are like this from then on."""
    return lambda world: [setattr(world.links[at], name, value) for at in numbers for name, value in facts.items()]


class World:
    """A run on `names`, none of which is this machine, each with two ranks; its links, its clock, and who watches."""

    def __init__(self, tmp_path: Path, names: Sequence[str] = ("n1", "n2"), **cluster: Any) -> None:
        path = new_run_path(tmp_path / "runs", "tiny")
        settings = ClusterConfig(ranks_per_node=2, **cluster)
        config = RunConfig(cluster=settings, train=TrainConfig(steps=STEPS, seq_len=64))
        plan = build_local_plan(config, node_facts(names[0]), path)
        nodes = [replace(plan.nodes[0], name=name, node_rank=at, first_rank=2 * at) for at, name in enumerate(names)]
        self.plan = with_files(replace(plan, nodes=tuple(nodes), world_size=2 * len(names)))
        self.run = create_run(path, dict(self.plan.files))
        self.clock, self.observer, self.stop = Clock(), Observer(), StopRequests()
        self.links = [FakeLink(name, self.run, self.clock) for name in names]

    def lead(self, *, detached: bool = False, timing: LaunchTiming = TIMING) -> LaunchOutcome:
        """Lead the run to its end."""
        options = ControlOptions(detached=detached, timing=timing, clock=self.clock)
        return control(self.plan, self.run, self.links, self.observer, self.stop, options)

    def failure(self, timing: LaunchTiming = TIMING) -> Failure:
        """Why the run, led to its end, failed."""
        failure = self.lead(timing=timing).failure
        assert failure is not None
        return failure

    def press(self) -> None:
        """Somebody asks for the end."""
        self.stop.count, self.stop.cause = self.stop.count + 1, "Ctrl-C"

    def at(self, seconds: float, action: Callable[[], Any]) -> None:
        """Have something done so many seconds after now."""
        self.clock.after(seconds, lambda: (action(), None)[1])

    def play(self, *story: Scene) -> None:
        """Have all of it done: at once what comes in second 0."""
        for seconds, act in story:
            if seconds:
                self.at(seconds, lambda act=act: act(self))  # type: ignore[misc]
            else:
                act(self)

    def step(self, number: int, seconds: float = 1.0) -> None:
        """Rank 0 records a step."""
        append_json_line(self.run.path / "metrics.jsonl", {"step": number, "step_time_s": seconds})

    def phase(self, name: str) -> None:
        """Rank 0 records a phase."""
        self.run.append_event("phase", phase=name)

    def first_node_says(self, state: str) -> None:
        """Rank 0, on a node far away, moves its run.json."""
        self.links[0].leave("run.json", {"state": state})

    def complete(self) -> None:
        """All ranks come to their end."""
        self.first_node_says("completed")
        for link in self.links:
            link.end(0)

    @property
    def state(self) -> dict[str, Any]:
        return self.run.read_state()
