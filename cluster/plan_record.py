"""A launch plan from RUN/launch.json. The file may be damaged or made by somebody else: everything in it is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.env.facts import EnvironmentVariable
from cluster.errors import ClusterError
from cluster.launch.runner import RUNNERS, runner_of
from cluster.plan import CONFIG_FILE, NODE_FILES, PLAN_FILE, PLAN_FORMAT, Backend, LaunchPlan, NodePlan
from cluster.remote_text import one_line
from cluster.ssh.hosts import is_host_name
from engine.config.errors import ConfigError
from engine.config.settings import config_from_dict
from engine.runs.files import replace_file
from engine.runs.folder import RunFolder

MAX_BYTES = 64 << 20
MAX_NODES = 16384
_BACKENDS = ("nccl", "gloo")


class PlanFileError(ClusterError):
    """What should be a launch plan is none."""


def read_launch_plan(run_path: Path) -> LaunchPlan:
    """The plan of the run in folder `run_path`, also after that folder was moved. Raises PlanFileError."""
    path = run_path / PLAN_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        plan = plan_from_dict(json.loads(raw))
    except FileNotFoundError as error:
        raise PlanFileError(f"{path}: there is none, so `burst launch` did not start this run") from error
    except (OSError, ValueError, RecursionError, PlanFileError) as error:
        raise PlanFileError(f"{path}: not a launch plan: {one_line(str(error), 300)}") from error
    plan = _moved(plan, run_path.absolute())
    return runner_of(plan).with_nodes(plan)


def write_plan_files(plan: LaunchPlan, run: RunFolder) -> None:
    """Lay the files of `plan` into the folder of a run that has one, each in the place of the one before it.

    Raises ClusterError.
    """
    for name, text in plan.files:
        path = run.path / name
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, text)
        except OSError as error:
            raise ClusterError(f"{path}: {error.strerror}") from error


def with_texts(plan: LaunchPlan) -> LaunchPlan:
    """`plan` with the texts that other machines need to start it, read from its run folder unless it has them.

    A plan that comes from launch.json has none. Raises PlanFileError.
    """
    names = {name for node in plan.nodes if node.folder != plan.run_path for name in (*NODE_FILES, node.env_file)}
    found = {name: _text(Path(plan.run_path), name) for name in sorted(names - dict(plan.files).keys())}
    return replace(plan, files=(*plan.files, *((name, text) for name, text in found.items() if text is not None)))


def _text(folder: Path, name: str) -> str | None:
    """A file of a run folder; None when there is none and the ranks can do without it."""
    try:
        if (folder / name).stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if name != CONFIG_FILE:
            return None
        raise PlanFileError(f"{folder / name}: there is none, but the nodes of the run need it") from error
    except (OSError, ValueError) as error:
        text = one_line(str(error), 300)
        raise PlanFileError(f"{folder / name}: cannot be read, but the nodes of the run need it: {text}") from error


def plan_from_dict(document: Mapping[str, Any]) -> LaunchPlan:
    """The plan that `LaunchPlan.to_dict` wrote, `files` included if they are there.

    Raises PlanFileError, naming the first thing that is wrong.
    """
    table = _Table(document, "")
    if table.whole("format") != PLAN_FORMAT:
        raise PlanFileError(f"format: got {table.whole('format')}, expected {PLAN_FORMAT}; made by another burst?")
    try:
        config = config_from_dict(table.table("config").values)
    except ConfigError as error:
        raise PlanFileError(f"config: {error}") from error
    nodes = tuple(_node(entry) for entry in table.tables("nodes"))
    _check_ranks(nodes, table.whole("world_size"))
    cluster = config.cluster
    backend = Backend(
        table.choice("backend", _BACKENDS),
        table.text("backend_reason"),
        cluster.ranks_per_node or 1,
        cluster.threads_per_rank or 1,
    )
    files = table.texts_by_name("files") if "files" in table.values else {}
    return LaunchPlan(
        run_path=table.path("path"),
        config=config,
        world_size=table.whole("world_size"),
        backend=backend,
        nodes=nodes,
        files=tuple(files.items()),
        launcher=table.choice("launcher", tuple(RUNNERS)),
        is_exclusive=table.truth("exclusive"),
    )


def _node(table: _Table) -> NodePlan:
    name = table.text("name")
    if not is_host_name(name):
        raise PlanFileError(f"{table.place}name: {one_line(name, 60)!r} is no name of a node")
    reasons = table.texts_by_name("reasons")
    environment = table.texts_by_name("environment")
    variables = tuple(EnvironmentVariable(key, value, reasons.get(key, "")) for key, value in environment.items())
    container = table.values.get("container")
    return NodePlan(
        name=name,
        node_rank=table.whole("node_rank"),
        first_rank=table.whole("first_rank"),
        local_ranks=table.whole("local_ranks"),
        argv=table.texts("command"),
        environment=variables,
        cwd=table.path("cwd"),
        folder=table.path("folder"),
        log_dir=table.path("log_dir"),
        container=None if container is None else table.text("container"),
    )


def _check_ranks(nodes: tuple[NodePlan, ...], world_size: int) -> None:
    """Nodes are numbered, named once, and hold the ranks in order."""
    if not 1 <= len(nodes) <= MAX_NODES:
        raise PlanFileError(f"nodes: got {len(nodes)}, expected 1 to {MAX_NODES}")
    if len({node.name for node in nodes}) != len(nodes):
        raise PlanFileError("nodes: a name occurs twice")
    first = 0
    for number, node in enumerate(nodes):
        if (node.node_rank, node.first_rank) != (number, first) or node.local_ranks < 1:
            raise PlanFileError(f"nodes[{number}]: its ranks do not follow those of the node before")
        first += node.local_ranks
    if first != world_size:
        raise PlanFileError(f"world_size: got {world_size}, but the nodes have {first} ranks")


def _moved(plan: LaunchPlan, run_path: Path) -> LaunchPlan:
    """The plan of a run folder that lies at `run_path` now; folders of nodes that are not it stay what they were."""
    old = plan.run_path
    if old == str(run_path):
        return plan
    nodes = [
        replace(node, folder=str(run_path), log_dir=str(run_path / PurePosixPath(node.log_dir).relative_to(old)))
        if node.folder == old and PurePosixPath(node.log_dir).is_relative_to(old)
        else node
        for node in plan.nodes
    ]
    return replace(plan, run_path=str(run_path), nodes=tuple(nodes))


class _Table:
    """A JSON object whose values are taken by name and kind; `place` leads to it, such as `nodes[0].`."""

    def __init__(self, values: Any, place: str) -> None:
        if not isinstance(values, Mapping):
            raise PlanFileError(f"{place.rstrip('.') or 'the plan'}: expected a table, got {_kind(values)}")
        self.values, self.place = values, place

    def text(self, name: str) -> str:
        value = self._get(name, str, "a text")
        assert isinstance(value, str)
        return value

    def whole(self, name: str) -> int:
        value = self._get(name, int, "a whole number")
        if isinstance(value, bool) or not 0 <= value < 2**31:
            raise PlanFileError(f"{self.place}{name}: got {value}, expected a whole number from 0")
        return int(value)

    def truth(self, name: str) -> bool:
        return bool(self._get(name, bool, "true or false"))

    def choice(self, name: str, legal: tuple[str, ...]) -> str:
        if self.text(name) not in legal:
            found = one_line(self.text(name), 40)
            raise PlanFileError(f"{self.place}{name}: got {found!r}, expected one of {', '.join(legal)}")
        return self.text(name)

    def path(self, name: str) -> str:
        """An absolute path without `..`."""
        path = PurePosixPath(self.text(name))
        if not path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise PlanFileError(f"{self.place}{name}: {one_line(str(path), 100)!r} is no absolute path")
        return self.text(name)

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._get(name, list, "a list of texts")
        if not values or not all(isinstance(value, str) and "\0" not in value for value in values):
            raise PlanFileError(f"{self.place}{name}: expected a list of texts, with one at least")
        return tuple(values)

    def texts_by_name(self, name: str) -> dict[str, str]:
        values = self.table(name).values
        if not all(isinstance(key, str) and isinstance(value, str) for key, value in values.items()):
            raise PlanFileError(f"{self.place}{name}: expected a table of texts")
        return dict(values)

    def table(self, name: str) -> _Table:
        return _Table(self._get(name, Mapping, "a table"), f"{self.place}{name}.")

    def tables(self, name: str) -> list[_Table]:
        values = self._get(name, list, "a list of tables")
        return [_Table(value, f"{self.place}{name}[{index}].") for index, value in enumerate(values)]

    def _get(self, name: str, kind: type[Any], words: str) -> Any:
        if name not in self.values:
            raise PlanFileError(f"{self.place}{name}: is missing")
        if not isinstance(self.values[name], kind):
            raise PlanFileError(f"{self.place}{name}: expected {words}, got {_kind(self.values[name])}")
        return self.values[name]


def _kind(value: Any) -> str:
    return {dict: "a table", list: "a list", str: "a text", type(None): "null"}.get(type(value), str(value)[:40])
