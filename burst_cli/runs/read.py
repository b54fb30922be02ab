"""What the folder of a run says of it: what was planned, what it recorded, what its nodes left, how far it is; and its
state, for which the nodes are asked where nobody controls it.

Cheap enough for hundreds of runs. Everything in the folder may be damaged, half written or hostile (nodes wrote some of
it): what cannot be read is None. No drawing here.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from cluster.agent.folder import read_status
from cluster.control.attempt import RunState, find_controller, read_run_state
from cluster.control.judge import StepWatch
from cluster.control.link import NodeStatus, StrangeAnswerError, as_status
from cluster.remote_text import number, rows, seconds_between, table, whole, word
from engine.config.errors import BurstError, ConfigError
from engine.config.yaml_text import load_yaml
from engine.runs.figures import count_of
from engine.runs.files import read_json_object
from engine.runs.folder import RESOLVED_FILE, RunFolder, RunFolderError
from engine.runs.record import FINALS, MAXIMA, MEDIANS, facts_of_run, final_title, summarise

ASK_AGAIN_S = 10.0
STATE_STYLES = {
    "planned": "dim",
    "starting": "cyan",
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "oom": "red",
    "cancelled": "yellow",
    "lost": "bold magenta",
    "unreadable": "bold red",
}
MAX_FILE_BYTES = 8 * 2**20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # what `RunFolder.log_dir` makes of any name
_OF_THE_LAUNCHER = ("lease", "spec.json", "stop.json", "stacks.json")  # files in the folder of a node


@dataclass(frozen=True)
class PlannedNode:
    """One node of the plan and the ranks it has. rdma_ports: whether NCCL is told which InfiniBand or RoCE to use."""

    name: str
    ranks: range
    rdma_ports: bool = False


@dataclass(frozen=True)
class RunFacts:
    """What a run was asked to do; None is not known."""

    steps: int | None = None
    seq_len: int | None = None
    preset: str | None = None
    world_size: int | None = None
    hang_timeout_s: float | None = None
    launcher: str | None = None
    nodes: tuple[PlannedNode, ...] = ()

    @property
    def shape(self) -> str:
        """`2 x 4` for two nodes of four ranks; `8 ranks` where nodes are not known."""
        if not self.nodes:
            return "" if self.world_size is None else count_of("rank", self.world_size)
        sizes = sorted({len(node.ranks) for node in self.nodes})
        return f"{len(self.nodes)} x {sizes[0] if len(sizes) == 1 else f'{sizes[0]}-{sizes[-1]}'}"


def read_facts(run: RunFolder) -> RunFacts:
    """From launch.json; for a run without one, from config.yaml and the nodes that have written logs."""
    plan = read_table(run.path / "launch.json")
    config = table(plan, "config") or read_table(run.path / "config.yaml")
    train, cluster = table(config, "train"), table(config, "cluster")
    return RunFacts(
        steps=whole(train, "steps"),
        seq_len=whole(train, "seq_len"),
        preset=_preset(run, config),
        world_size=whole(plan, "world_size") or whole(cluster, "ranks_per_node"),
        hang_timeout_s=number(cluster, "hang_timeout_s"),
        launcher=word(plan, "launcher"),
        nodes=tuple(map(_planned, rows(plan, "nodes"))),
    )


def _preset(run: RunFolder, config: Mapping[str, Any]) -> str | None:
    """Return the preset that runs: of attention=auto the one that the launch resolved, once it has."""
    preset = word(table(config, "attention"), "preset", 40)
    if preset != "auto":
        return preset
    resolved = table(read_table(run.path / RESOLVED_FILE), "run")
    return word(table(resolved, "method"), "preset", 40) or preset


def _planned(entry: Mapping[str, Any]) -> PlannedNode:
    environment, first = table(entry, "environment"), whole(entry, "first_rank") or 0
    return PlannedNode(
        word(entry, "name", 100) or word(entry, "hostname", 100) or "?",
        range(first, first + (whole(entry, "local_ranks") or 0)),
        "NCCL_IB_HCA" in environment and environment.get("NCCL_IB_DISABLE", "0") == "0",
    )


def read_table(path: Path) -> dict[str, Any]:
    """The table in a JSON or YAML file; empty when there is none that can be read.

    config.yaml goes without the checks of `load_config`, which take ten times as long.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        is_yaml = path.suffix == ".yaml"
        document = load_yaml(path.read_text(encoding="utf-8")) if is_yaml else read_json_object(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def read_nodes(run: RunFolder, facts: RunFacts) -> list[NodeStatus]:
    """What the nodes last left in the run folder; `heard_s` is the age of the newest of it. Asks nobody."""
    names = [node.name for node in facts.nodes]
    folders = {path.name for path in (run.path / "nodes").glob("*") if _NAME.fullmatch(path.name)}
    unplanned = sorted(folders - {run.log_dir(name).name for name in names})
    return [_node(name, run) for name in [*names, *unplanned]]


def _node(name: str, run: RunFolder) -> NodeStatus:
    log_dir = run.log_dir(name)
    heard_s = min(_age(log_dir), _age(run.path / "nodes" / log_dir.name))
    try:
        return NodeStatus(name, heard_s=heard_s, **as_status(read_status(str(run.path), name)))
    except StrangeAnswerError as error:
        return NodeStatus(name, heard_s=heard_s, problem=str(error))


def _age(folder: Path) -> float:
    """Seconds since a node wrote anything in a folder; infinite when there is nothing."""
    try:
        newest = max(path.stat().st_mtime for path in folder.iterdir() if path.name not in _OF_THE_LAUNCHER)
    except (OSError, ValueError):
        return float("inf")
    return max(0.0, time.time() - newest)


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether the record is of a run that only evaluated."""
    return record.get("evaluated_step") is not None


def run_record(run: RunFolder) -> dict[str, Any]:
    """{run_id, exp, status, path, lost, ...summary}: what `burst report` shows and `--json` prints.

    `problems` names what is damaged, `lost` says that nobody leads the run. A run without summary.json (it failed, or
    still runs) has its figures computed from metrics.jsonl.
    """
    problems: list[str] = []
    written = _written_summary(run, problems)
    facts = {} if written is not None else _config_facts(run, problems)
    summary = {**facts, **(_summary_of_metrics(run, problems) if written is None else written)}
    seen = try_read_run_state(run)
    if seen.problem is not None:
        problems.insert(0, seen.problem)
    else:
        summary |= {name: seen.document.get(name) for name in ("started_at", "ended_at", "exit_code", "failure")}
    if summary.get("world_size") is None:
        summary["world_size"] = seen.document.get("world_size")
    path, is_lost = str(run.path), seen.is_lost
    own = {"run_id": run.run_id, "exp": run.exp, "status": seen.state, "path": path, "lost": is_lost}
    return {**own, **summary, **own, **({"problems": problems} if problems else {})}


def read_summary(run: RunFolder, problems: list[str]) -> dict[str, Any]:
    """The figures of a whole run, as the trainer wrote them; of a run without summary.json computed from its metrics.

    Every verb that shows a run that has ended takes its figures from here. What is damaged is appended to `problems`.
    """
    written = _written_summary(run, problems)
    return _summary_of_metrics(run, problems) if written is None else written


def _written_summary(run: RunFolder, problems: list[str]) -> dict[str, Any] | None:
    try:
        return run.read_summary() or None
    except RunFolderError as error:
        problems.append(str(error))
        return None


def _summary_of_metrics(run: RunFolder, problems: list[str]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    try:
        rows = run.read_metrics()
    except OSError as error:
        problems.append(f"{run.path / 'metrics.jsonl'}: {error.strerror}")
    return summarise(rows)


def _config_facts(run: RunFolder, problems: list[str]) -> dict[str, Any]:
    try:
        return facts_of_run(run.path)
    except ConfigError as error:
        problems.extend(error.problems)
        return {}


def look_at(run: RunFolder) -> RunState:
    """The state of `run`; the nodes of one that nobody controls are asked, and it is judged if it has ended."""
    seen = read_run_state(run)
    if not seen.is_lost:
        return seen
    if not (run.path / "launch.json").is_file():
        text = "it was started without `burst launch`, and the process that said so in run.json is gone"
        return replace(seen, problem=text)
    from cluster.control.controller import settle

    try:
        return settle(run)
    except BurstError as error:
        return RunState(run.read_state(), find_controller(run), is_lost=True, problem=str(error))


def try_read_run_state(run: RunFolder) -> RunState:
    """The state by the run folder alone; of a run whose run.json cannot be read, that and why."""
    try:
        return read_run_state(run)
    except RunFolderError as error:
        return RunState({"state": "unreadable"}, problem=str(error))


class RunWatch:
    """`look_at` again and again; the nodes of a run that nobody controls are asked every ASK_AGAIN_S."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._next_ask = run, 0.0
        self._asked: RunState | None = None

    def look(self) -> RunState:
        """The present state."""
        seen = read_run_state(self._run)
        if not seen.is_lost:
            return seen
        if self._asked is None or time.monotonic() >= self._next_ask:
            self._asked = look_at(self._run)
            self._next_ask = time.monotonic() + ASK_AGAIN_S
        return self._asked

    def ended(self) -> int | None:
        """The exit code once the run has ended, or nothing can be known of it any more; None while it goes on."""
        seen = self.look()
        return seen.exit_code if seen.is_final or seen.problem is not None else None


# --- how far it is ----------------------------------------------------------------------------------------------------


_TAIL_BYTES = 256 * 1024  # of records that were there before: many rows, whatever the length of the run
# A rank is called a straggler when it was the one in so many of the last steps, and they lost so many seconds by it:
# on a machine whose cores are shared some rank is always last, by little and never the same for long.
_STRAGGLER_STEPS, _STRAGGLER_LEAST_STEPS, _STRAGGLER_LOST_S = 10, 8, 10.0


# Figures of steps, and what a summary calls them.
_TITLES = {name: name for name in (*MEDIANS, *MAXIMA)} | {name: final_title(name) for name in FINALS}


class RunProgress:
    """The present state of one run. `poll()` reads what is new in metrics.jsonl and events.jsonl.

    Of what was there before, the end is read, so that hundreds of runs take a moment. total_steps: those of its
    configuration unless given. ran_s: seconds since the launch, for one who joins later. measured_steps: how many steps
    the medians of `use_summary` are of.
    """

    def __init__(
        self,
        run: RunFolder,
        total_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        ran_s: float = 0.0,
    ) -> None:
        self.run, self.clock, self._started = run, clock, clock() - ran_s
        self.total_steps = total_steps or self.facts.steps or 0
        self.latest: Mapping[str, Any] | None = None
        self.validation: Mapping[str, Any] | None = None
        self.losses: list[float] = []
        self.measured_steps: int | None = None
        self.warnings: list[str] = []
        self._steps = StepWatch(run, clock, _TAIL_BYTES)
        self._figures: dict[str, Any] = {}
        self._stragglers: deque[tuple[int, float]] = deque(maxlen=_STRAGGLER_STEPS)  # rank or -1, seconds lost

    @cached_property
    def facts(self) -> RunFacts:
        """What the run was asked to do."""
        return read_facts(self.run)

    def poll(self) -> list[str]:
        """Take up what is new; the warnings among it."""
        rows, events = self._steps.poll()
        for row in rows:
            if isinstance(row.get("step"), int):
                self._add(row)
        news = [_warning(event) for event in events if event.get("kind") in ("warning", "dropped")]
        self.warnings += news
        return news

    @property
    def phase(self) -> str:
        """What the ranks do."""
        return self._steps.phase or "starting the ranks"

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._steps.step

    @property
    def straggler(self) -> int | None:
        """The rank that the others waited for in nearly all of the last steps, and for long enough to matter."""
        rank = statistics.mode([rank for rank, _ in self._stragglers] or [-1])
        lost = [seconds for late, seconds in self._stragglers if late == rank]
        matters = rank >= 0 and len(lost) >= _STRAGGLER_LEAST_STEPS and sum(lost) >= _STRAGGLER_LOST_S
        return rank if matters else None

    @property
    def silence_s(self) -> float:
        """Seconds in which no rank advanced."""
        return self._steps.silence_s

    @property
    def hang_limit_s(self) -> float:
        """After so many seconds of silence the controller has the ranks' stacks taken."""
        return self._steps.limits_s(self.facts.hang_timeout_s, self.total_steps)[0]

    def figure(self, name: str) -> float | None:
        """A figure of the latest step that has it, None when it is not known; after `use_summary` that of the run."""
        return number(self._figures, name)

    def use_summary(self) -> None:
        """Replace the figures of the latest step by those of the whole run, as `burst report` shows them.

        For runs that have ended: a single step says little of a run, and its last one least.
        """
        summary = read_summary(self.run, [])
        self._figures = {name: summary.get(title, summary.get(name)) for name, title in _TITLES.items()}
        self.measured_steps = whole(summary, "step_time_s_n")

    def elapsed_s(self) -> float:
        """Seconds since the launch."""
        return self.clock() - self._started

    def remaining_s(self) -> float | None:
        """Seconds left, from the median of the last steps; None before there are any."""
        if not self._steps.step_times:
            return None
        return statistics.median(self._steps.step_times) * max(0, self.total_steps - self.step)

    def _add(self, row: Mapping[str, Any]) -> None:
        self.latest = row
        # A step without labels has no loss: that of an earlier step would read as its own.
        has_no_labels = row.get("dropped") == "no_labels"
        self._figures |= {name: value for name, value in row.items() if value is not None or has_no_labels}
        if (loss := number(row, "loss")) is not None:
            self.losses.append(loss)
        if row.get("validation_loss") is not None:
            self.validation = row
        rank = row.get("straggler_rank")
        least, most = (number(row, f"rank_wait_s_{end}") or 0.0 for end in ("min", "max"))
        self._stragglers.append((rank if isinstance(rank, int) else -1, most - least))


def read_progress(run: RunFolder, seen: RunState) -> RunProgress:
    """How far a run in state `seen` is; figures of its latest step while it lives, else those of its summary."""
    progress = RunProgress(run, ran_s=seconds_between(seen.document.get("started_at")) or 0.0)
    progress.poll()
    if seen.shown not in ("starting", "running"):
        progress.use_summary()
    return progress


def _warning(event: Mapping[str, Any]) -> str:
    if event.get("kind") == "warning":
        return str(event.get("message"))
    return (
        f"step {event.get('step')} is dropped ({event.get('reaction')}): {event.get('reason')}; "
        f"samples {event.get('first_sample')} to {event.get('last_sample')}"
    )
