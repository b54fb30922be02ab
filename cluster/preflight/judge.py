"""Whether the surveyed nodes can carry a run: every problem at once, said once for all nodes that have it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.errors import ClusterError
from cluster.preflight.survey import DataFacts, RemoteFacts, Survey, needed_modules
from cluster.ssh.nodes import fold_nodes
from engine.config.errors import BurstError
from engine.config.settings import RunConfig

OLDEST_PYTHON = (3, 11)
CLOCK_SKEW_S = 5.0
LEAST_DISK_BYTES = 64 << 20
WANTED_DISK_BYTES = 1 << 30
_SHOWN = 3
_NUMBERS = re.compile(r"[0-9][0-9.]*")


@dataclass(frozen=True)
class NodeProblem:
    """What keeps nodes from carrying the run. is_risk: --force may take it."""

    nodes: tuple[str, ...]
    text: str
    is_risk: bool = False

    def __str__(self) -> str:
        return f"{fold_nodes(self.nodes)}: {self.text}"


class UnfitNodesError(ClusterError):
    """Nodes that cannot carry the run; `problems` has them all."""

    def __init__(self, problems: Sequence[NodeProblem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in problems]
        if problems and all(problem.is_risk for problem in problems):
            lines.append("To start all the same, add --force.")
        super().__init__("\n".join(lines))


def check_survey(survey: Survey, config: RunConfig, *, force: bool = False) -> tuple[str, ...]:
    """Warnings. Raises UnfitNodesError with every problem, of which `force` makes the risks warnings."""
    problems = find_problems(survey, config)
    fatal = [problem for problem in problems if not (problem.is_risk and force)]
    if fatal:
        raise UnfitNodesError(fatal)
    return tuple(str(problem) for problem in problems)


def find_problems(survey: Survey, config: RunConfig) -> tuple[NodeProblem, ...]:
    """Every problem, that of nodes which did not answer first."""
    facts = tuple(survey.facts[node] for node in survey.nodes if node in survey.facts)
    found = _unreachable({node: _unanswered(node, error) for node, error in survey.errors.items()})
    rules: tuple[_Rule, ...] = (_busy, _processes, _gpus_in_use, _network, _disk, _clock)
    rules += (_python, _modules) if config.cluster.container.runtime == "bare" else (_engine, _image)
    for rule in rules:
        found += [problem for one in facts for problem in rule(one, config)]
    found += [*_port(survey, config), *_data(facts, config), *_gpu_counts(facts, config), *_differences(facts, config)]
    return _folded(found)


_Rule = Callable[[RemoteFacts, RunConfig], Iterable[NodeProblem]]


def _folded(problems: Iterable[NodeProblem]) -> tuple[NodeProblem, ...]:
    """Problems with the same text told once."""
    nodes: dict[NodeProblem, list[str]] = {}
    for problem in problems:
        nodes.setdefault(replace(problem, nodes=()), []).extend(problem.nodes)
    return tuple(replace(problem, nodes=tuple(dict.fromkeys(names))) for problem, names in nodes.items())


def _unreachable(problems: Mapping[str, NodeProblem]) -> list[NodeProblem]:
    """Nodes that fail alike get the words of the first: those of the others differ in names and addresses alone."""
    first: dict[str, str] = {}
    found = []
    for node, problem in problems.items():
        alike = _NUMBERS.sub("#", problem.text.replace(node, "#"))
        found.append(replace(problem, text=first.setdefault(alike, problem.text)))
    return found


def _unanswered(node: str, error: BurstError) -> NodeProblem:
    return NodeProblem((node,), str(error).removeprefix(f"{node}: "))


def _busy(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    if facts.lock is not None:
        text = f"run {facts.lock} holds it; wait for its end, end it with `burst cancel {facts.lock}`, or take others"
        yield NodeProblem((facts.node,), text, is_risk=True)


def _processes(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    """What earlier runs left; processes of the run that holds the node are its own matter."""
    left: dict[str, list[str]] = {}
    for pid, run_id in facts.runs.items():
        if run_id != facts.lock:
            left.setdefault(run_id, []).append(str(pid))
    for run_id, pids in left.items():
        left_over = "1 process is" if len(pids) == 1 else f"{len(pids)} processes are"
        shown = " ".join(pids[:_SHOWN]) + (" ..." if len(pids) > _SHOWN else "")
        text = f"{left_over} left of run {run_id} (pid {shown}); `burst cancel {run_id}` ends what is left"
        yield NodeProblem((facts.node,), text, is_risk=True)


def _gpus_in_use(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    others = [one for one in facts.gpu_processes if one.pid not in facts.runs]
    if not others or config.cluster.backend == "gloo":
        return
    shown = "; ".join(f"{one.text} (pid {one.pid}, {one.user})" for one in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    text = f"its GPUs are in use: {shown}{more}; wait for their end, or take other nodes"
    yield NodeProblem((facts.node,), text, is_risk=True)


def _network(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    if facts.environment.address is None:
        yield NodeProblem((facts.node,), facts.environment.no_address)


def _disk(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    free, where = facts.disk_free_bytes, "cluster.node_folder"
    if free is None:
        why = facts.problems.get("disk", "its free space is not known")
        yield NodeProblem((facts.node,), f"{why}; set {where} to a folder of yours")
    elif free < WANTED_DISK_BYTES:
        text = (
            f"{free >> 20} MiB free under {facts.root}, expected {WANTED_DISK_BYTES >> 20}; make room, or set {where}"
        )
        yield NodeProblem((facts.node,), text, is_risk=free >= LEAST_DISK_BYTES)


def _clock(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    offset = facts.clock_offset_s
    if offset is not None and abs(offset) - facts.clock_error_s > CLOCK_SKEW_S:
        text = f"its clock is {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}; set it (chrony, ntp)"
        yield NodeProblem((facts.node,), text, is_risk=True)


def _python(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    python, remedy = facts.python, "set cluster.python to one, or use cluster.container.runtime=docker"
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if python is None:
        why = facts.problems.get("python", "it did not tell")
        yield NodeProblem((facts.node,), f"no Python for the ranks: {why}; {remedy}")
    elif python.version[:2] < OLDEST_PYTHON:
        text = f"{python.executable} is Python {python.version_text}, ranks need {oldest} or newer; {remedy}"
        yield NodeProblem((facts.node,), text)


def _modules(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    python = facts.python
    missing = [] if python is None else [name for name in needed_modules(config) if python.modules.get(name) is None]
    if python is not None and missing and python.version[:2] >= OLDEST_PYTHON:
        text = (
            f"{python.executable} has no {', '.join(missing)}; install it there, or set cluster.python to one that has"
        )
        yield NodeProblem((facts.node,), text)


def _engine(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    if "engine" in facts.problems:
        text = f"the container engine cannot be used: {facts.problems['engine']} (cluster.container.command)"
        yield NodeProblem((facts.node,), text)


def _image(facts: RemoteFacts, config: RunConfig) -> Iterator[NodeProblem]:
    image = config.cluster.container.image
    if "engine" not in facts.problems and facts.image is None:
        why = facts.problems.get("image")
        text = (
            f"image {image} cannot be looked at: {why}" if why else f"it has no image {image}; run `burst image push`"
        )
        yield NodeProblem((facts.node,), text)


def _port(survey: Survey, config: RunConfig) -> Iterator[NodeProblem]:
    """Only the first node listens."""
    first = survey.facts.get(survey.nodes[0])
    if first is not None and first.port is None:
        why = first.problems.get("port", "it did not tell")
        text = f"no port for the rendezvous: {why}; free it, or set cluster.master_port to another one (null: any)"
        yield NodeProblem((first.node,), text)


def _data(facts: Sequence[RemoteFacts], config: RunConfig) -> Iterator[NodeProblem]:
    """Data that a node lacks; data that is there and not the same everywhere."""
    for one in facts:
        if "data" in one.problems:
            yield NodeProblem((one.node,), f"its data files are not known: {one.problems['data']}", is_risk=True)
        for entry in one.data:
            if entry.problem:
                text = f"data {entry.path}: {entry.problem}; bring it there under this name"
                yield NodeProblem((one.node,), text)
    for index in range(max((len(one.data) for one in facts), default=0)):
        column = {one.node: one.data[index] for one in facts if index < len(one.data) and not one.data[index].problem}
        kinds = _by_value({node: _sameness(entry) for node, entry in column.items() if entry.digest})
        if len(kinds) > 1:
            path = next(iter(column.values())).path
            text = f"data {path} differs: {_spread(kinds)}; give all nodes the same files"
            yield NodeProblem(tuple(column), text, is_risk=True)


def _sameness(entry: DataFacts) -> str:
    return f"{entry.files} file{'' if entry.files == 1 else 's'}, {entry.size_bytes} bytes, {(entry.digest or '')[:8]}"


def _gpu_counts(facts: Sequence[RemoteFacts], config: RunConfig) -> Iterator[NodeProblem]:
    """Under NCCL every rank has a GPU of its own, on every node."""
    cluster = config.cluster
    counts = {one.node: len(one.gpus) for one in facts}
    if not counts or cluster.backend == "gloo":
        return
    for one in facts:
        if "gpus" in one.problems:
            yield NodeProblem((one.node,), f"its GPUs are not known: {one.problems['gpus']}")
    if any("gpus" in one.problems for one in facts):
        return
    if cluster.ranks_per_node is None and len(set(counts.values())) > 1:
        kinds = _by_value({node: _gpus(count) for node, count in counts.items()})
        text = f"{_spread(kinds)}; set cluster.ranks_per_node, or take nodes that are alike"
        yield NodeProblem(tuple(counts), text)
        return
    needed = cluster.ranks_per_node or max(counts.values())
    short = [node for node, count in counts.items() if count < needed or not count]
    if not short or (cluster.backend == "auto" and len(short) == len(counts)):
        return  # under auto, nodes that all lack GPUs compute on the CPU
    on_cpu = "set cluster.backend=gloo to run on the CPU"
    for node in short:
        if counts[node]:
            fewer = "set cluster.ranks_per_node to fewer, or cluster.backend=gloo to run on the CPU"
            yield NodeProblem((node,), f"{_gpus(counts[node])} for {needed} ranks; {fewer}")
        else:
            asked = "cluster.backend=nccl needs one per rank" if cluster.backend == "nccl" else "other nodes have some"
            yield NodeProblem((node,), f"no GPU, but {asked}; {on_cpu}")


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _differences(facts: Sequence[RemoteFacts], config: RunConfig) -> Iterator[NodeProblem]:
    """Versions that must be the same on all nodes, and are not."""
    if config.cluster.container.runtime != "bare":
        image = config.cluster.container.image
        identities = {one.node: one.image[:12] for one in facts if one.image is not None}
        yield from _differing(f"image {image}", identities, "run `burst image push`")
        return
    pythons = {one.node: one.python for one in facts if one.python is not None}
    # The corpus stdlib is the source code of the Python that reads it.
    digits = 3 if config.data.format == "stdlib" else 2
    versions = {node: ".".join(map(str, python.version[:digits])) for node, python in pythons.items()}
    yield from _differing("Python", versions, "set cluster.python to the same one")
    versions = {node: found for node, python in pythons.items() if (found := python.modules.get("torch"))}
    yield from _differing("torch", versions, "install the same version")


def _differing(what: str, values: Mapping[str, str], remedy: str) -> Iterator[NodeProblem]:
    kinds = _by_value(values)
    if len(kinds) > 1:
        yield NodeProblem(tuple(values), f"{what} differs: {_spread(kinds)}; {remedy} on all", is_risk=True)


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Nodes by value, the commonest first."""
    found: dict[str, list[str]] = {}
    for node, value in values.items():
        found.setdefault(value, []).append(node)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _spread(kinds: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {fold_nodes(nodes)}" for value, nodes in kinds.items())
