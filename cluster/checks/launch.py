"""Can these nodes carry a run? They are asked once, and judged by those checks of `burst check-nodes` that matter to a
launch, and by those of its own: every problem at once, said once for all nodes that have it.

Its own are made for one configuration: whose account a launch uses there, where runs lie, who holds the node, data, a
port, GPUs for the ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.agent.messages import safe_name
from cluster.checks.check import (
    Check,
    CheckGroup,
    Finding,
    FleetReport,
    NodeReport,
    Selection,
    Verdict,
    fold_reports,
    gib,
    known,
)
from cluster.checks.groups.host import VERSIONS, read_software
from cluster.checks.run import CheckOptions, check_nodes
from cluster.code import agent_question
from cluster.env.plan import FACT_QUESTIONS
from cluster.errors import ClusterError
from cluster.plan_nodes import node_root, text_files
from cluster.remote_text import one_line, plain_path
from cluster.ssh.connection import Connect
from cluster.ssh.hosts import Host, fold_nodes
from cluster.survey.drivers import SmiFailure, SmiLog
from cluster.survey.facts import NodeFacts
from cluster.survey.section import fill, listed
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig
from engine.data.rules import model_problems
from engine.predict.room import find_shortage, saves_checkpoints

NAME = "launch.node"
CHECKPOINT = "launch.checkpoint"
ROOM_BYTES = 1 << 30
_LIMIT_S = 100
_SUFFIXES = {"text": (), "jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",), "shards": ()}
_TEXT_SUFFIXES = (".json", ".jinja")  # of what is read in a tokenizer's folder
# No run starts while one of these is not as it should be, whatever --force says.
REQUIRED = frozenset(
    {
        *("ssh.reach", "net.interface", "net.machine", "host.python", "host.docker", "host.image"),
        *(f"launch.{name}" for name in ("adapters", "folder", "data", "ranks", "port", "source", "model")),
    }
)
# Of the others what fails is a risk that --force takes, and what is odd or unseen is said. What only makes a node slow
# or untidy is for `burst check-nodes`.
_TIMEOUT_S = 180.0


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


@dataclass(frozen=True)
class Fit:
    """Nodes that can carry the run, in the order of their ranks, and what is odd about them."""

    nodes: tuple[NodeFacts, ...]
    warnings: tuple[str, ...]


def check_launch(
    hosts: Sequence[Host],
    config: RunConfig,
    *,
    health: bool = False,
    force: bool = False,
    resumed: str | None = None,
    connect: Connect | None = None,
) -> Fit:
    """The nodes behind `hosts`, fit for `config`; nothing on them changes. Raises UnfitNodesError.

    health: look at what a run survives at first, too. force: take risks. resumed: id of the run, if it has begun.
    """
    cluster = config.cluster
    selection, groups = launch_checks(cluster, health=health, with_gpus=cluster.backend != "gloo")
    options = CheckOptions((*groups, launch_group(config, resumed)), selection, timeout_s=_TIMEOUT_S, connect=connect)
    report = check_nodes(hosts, cluster, options)
    selection, _ = launch_checks(cluster, health=health, with_gpus=_uses_gpus(cluster, report.facts))
    return Fit(tuple(report.facts.values()), judge_report(report, selection, force=force))


def launch_checks(cluster: ClusterConfig, *, health: bool, with_gpus: bool) -> tuple[Selection, tuple[CheckGroup, ...]]:
    """(what is wanted, the groups that it is of beside that of the launch itself, each imported only for who wants it).

    GPUs and adapters are looked at where NCCL uses them; between nodes nothing, for that takes its time.
    """
    in_containers = cluster.container.runtime == "docker"
    parts = (
        (with_gpus, "gpu", "gpu.busy"),
        (health and with_gpus, "gpu_reports ib", "gpu ib host.memlock host.nccl_conf"),
        (True, "net host", f"launch net.interface net.machine host.python {VERSIONS} ssh.clock"),
        (health, "", "net.mtu host.disk host.shm"),
        (in_containers, "engine", "host.docker host.image"),
        (health and in_containers, "engine", "host.docker_gpu"),
    )
    wanted = [(files.split(), names.split()) for is_wanted, files, names in parts if is_wanted]
    files = dict.fromkeys(file for found, _ in wanted for file in found)
    only = tuple(name for _, names in wanted for name in names)
    modules = [importlib.import_module(f"cluster.checks.groups.{file}") for file in files]
    groups = tuple(group for module in modules for group in module.GROUPS)
    return Selection(only, skip=("gpu.dcgm_diag",), may_lack=True), groups


def _uses_gpus(cluster: ClusterConfig, nodes: Mapping[str, NodeFacts]) -> bool:
    """Whether ranks get GPUs, as far as that is known."""
    counts = [count for facts in nodes.values() if (count := count_gpus(facts)) is not None]
    return cluster.backend == "nccl" or (
        cluster.backend == "auto" and min(counts, default=1) >= (cluster.ranks_per_node or 1)
    )


def judge_report(report: FleetReport, selection: Selection, *, force: bool = False) -> tuple[str, ...]:
    """Warnings. Raises UnfitNodesError with every problem of the report, of which `force` makes the risks warnings."""
    problems, warnings = [], [*report.notes]
    for fold in fold_reports(_by_subject(report, selection)):
        for finding in fold.findings:
            is_risk = REQUIRED.isdisjoint(finding.check.split(", "))
            problem = NodeProblem(fold.names, _text(finding), is_risk=is_risk)
            if not is_risk or (_is_problem(finding) and not force):
                problems.append(problem)
            else:
                warnings.append(str(problem))
    if problems:
        raise UnfitNodesError(problems)
    return tuple(warnings)


def _is_problem(finding: Finding) -> bool:
    """Whether it stops a launch. What differs between two nodes is odd on each of them, and stops them together."""
    is_shared = finding.check == VERSIONS or finding.check.startswith("launch.")
    is_odd = finding.severity is Verdict.WARN and is_shared and finding.check != CHECKPOINT
    return finding.severity is Verdict.FAIL or is_odd


def _by_subject(report: FleetReport, selection: Selection) -> Iterator[NodeReport]:
    """The findings of every node apart by check, or by why several could not be seen."""
    for name, node in report.nodes.items():
        subjects: dict[str, list[Finding]] = {}
        for finding in node.findings:
            if not selection.wants(finding.check):
                continue
            subject = finding.check
            if finding.severity is Verdict.UNKNOWN:
                evidence = f" ({finding.evidence})" if finding.evidence else ""
                finding = replace(finding, observed=(subject := finding.observed + evidence))
            subjects.setdefault(subject, []).append(finding)
        yield from (NodeReport(name, tuple(findings)) for findings in subjects.values())


def _text(finding: Finding) -> str:
    device = f" {finding.device}" if finding.device else ""
    expected = f", expected {finding.expected}" if finding.expected else ""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{finding.check}{device}: {finding.observed}{expected}{remedy}"


@dataclass(frozen=True)
class NodeModel:
    """The folder of the first weights as a node sees it. config: its config.json; None: `problem` says why not."""

    problem: str
    config: Mapping[str, Any] | None
    has_tokenizer: bool


@dataclass(frozen=True)
class NodeResources:
    """What a node offers a run. memory_bytes: None where it does not tell.

    room, port: (how many bytes are free, which port is free; None, and why there is none). locks: the runs that hold
    it, by the name that they know it by. data: (path, what is wrong there, its content; None: no time to look).
    checkpoint_room: as room, of the folder that checkpoints are written to, on the disk checkpoint_disk, which has the
    same name on all nodes that see it. has_source: whether there is a checkpoint to go on from; None: not known. model:
    None of a run that begins without weights of others.
    """

    home: str
    user: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    has_infiniband_devices: bool
    memory_bytes: int | None
    room: tuple[int | None, str]
    port: tuple[int | None, str]
    locks: Mapping[str, str]
    data: tuple[tuple[str, str, str | None], ...]
    checkpoint_room: tuple[int | None, str]
    checkpoint_disk: str
    has_source: bool | None
    model: NodeModel | None


def read_resources(facts: NodeFacts) -> NodeResources:
    """Raises UnreadableError."""

    def take(told: Any) -> NodeResources:
        data = [_data(one) for one in listed(told["data"])]
        offer: NodeResources = fill(
            NodeResources, {**told, "home": plain_path(told["home"]), "data": data, "model": None}
        )
        return replace(offer, model=None if told["model"] is None else _model(told["model"]))

    return facts.probe.section(NAME).read(take)


def _data(told: Any) -> list[str | None]:
    path, problem = told["path"], told.get("problem", "")
    if problem or told["digest"] is None:
        return [path, problem, None]
    count = f"{told['files']} file{'' if told['files'] == 1 else 's'}"
    return [path, "", f"{count}, {told['bytes']} bytes, {told['digest'][:8]}"]


def _model(told: Any) -> NodeModel:
    config, has_tokenizer = told["config"], told["has_tokenizer"]
    if not isinstance(config, dict | None) or not isinstance(has_tokenizer, bool):
        raise ValueError("no config.json")
    problem = one_line(str(told["problem"]), 200) or ("" if config is not None else "it is no JSON object")
    return NodeModel(problem, config, has_tokenizer)


def check_adapters(check: Check, facts: NodeFacts) -> list[Finding]:
    """What adapters the node has: without knowing them its ranks would be told to do without."""
    return [check.ok(f"{len(facts.adapters.ports)} ports")]


def check_folder(check: Check, facts: NodeFacts) -> list[Finding]:
    """Runs can be laid where cluster.node_folder says, and there is room for one."""
    (free, problem), root = read_resources(facts).room, node_root(facts.config)
    if free is None:
        return [check.fail(problem, "set cluster.node_folder to a folder of yours")]
    text = f"{gib(free)} free under {root}"
    if free >= ROOM_BYTES:
        return [check.ok(text)]
    return [check.expecting(f"at least {gib(ROOM_BYTES)}").fail(text, "make room, or set cluster.node_folder")]


def check_holder(check: Check, facts: NodeFacts) -> list[Finding]:
    """No run holds the node: two would share its GPUs."""
    run_id = read_resources(facts).locks.get(safe_name(facts.node))
    if run_id is None:
        return [check.ok("no run holds it")]
    is_ours = " of " not in run_id  # a run id has no blanks
    end = f"end it with `burst cancel {run_id}`" if is_ours else "ask its user"
    remedy = f"wait for its end, {end}, or take others"
    return [check.fail(f"run {run_id} holds it", remedy)]


def check_data(check: Check, facts: NodeFacts) -> list[Finding]:
    """Every file that ranks read is there."""
    remedy = "bring it there under this name"
    missing = [check.fail(f"data {path}: {wrong}", remedy) for path, wrong, _ in read_resources(facts).data if wrong]
    return missing or [check.ok("there")]


def _check_model(config: RunConfig) -> Callable[[Check, NodeFacts], list[Finding]]:
    def check_model(check: Check, facts: NodeFacts) -> list[Finding]:
        """The folder of the first weights holds the model that was configured, and tokens are its own."""
        model = read_resources(facts).model
        if model is None:
            return [check.skip("no weights are read")]
        remedy = "correct the setting, or bring the right folder there"
        if model.config is None:
            return [check.fail(f"{config.model.init_from}/config.json cannot be read: {model.problem}", remedy)]
        problems = model_problems(config, model.config, has_tokenizer=model.has_tokenizer)
        return [check.fail(one_line(problem, 1000), remedy) for problem in problems] or [check.ok("it fits")]

    return check_model


def count_gpus(facts: NodeFacts) -> int | None:
    """How many GPUs the node has for ranks; None while nvidia-smi is there and does not say."""
    if isinstance(facts.smi, SmiLog):
        return len(facts.gpus)
    is_absent = facts.has_no_gpus or facts.smi.failure in (SmiFailure.NOT_INSTALLED, SmiFailure.NO_DEVICES)
    return 0 if is_absent else None


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _port(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Only the first node listens."""
    for node, facts in list(nodes.items())[:1]:
        offer = known(read_resources, facts)
        if offer is not None and offer.port[0] is None:
            remedy = "free it, or set cluster.master_port to another one (null: any)"
            yield Check(node, "launch.port").fail(f"no port for the rendezvous: {offer.port[1]}", remedy)


def _ranks(nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Under NCCL every rank has a GPU of its own, on every node."""
    cluster = next(iter(nodes.values())).config
    counts = {node: count_gpus(facts) or 0 for node, facts in nodes.items()}
    unknown = [node for node, facts in nodes.items() if count_gpus(facts) is None]
    for node in unknown if cluster.backend != "gloo" else ():
        smi = nodes[node].smi
        assert not isinstance(smi, SmiLog)
        text = f"nvidia-smi: {smi.failure.value}: {smi.evidence}"
        yield Check(node, "launch.ranks").unknown(text, "see gpu.nvidia_smi")
    if unknown or cluster.backend == "gloo":
        return
    if cluster.ranks_per_node is None and len(set(counts.values())) > 1:
        for node, count in counts.items():
            check = Check(node, "launch.ranks", "as many on every node")
            yield check.fail(_gpus(count), "set cluster.ranks_per_node, or take nodes that are alike")
        return
    needed = cluster.ranks_per_node or max(counts.values())
    short = [node for node, count in counts.items() if count < needed or not count]
    if cluster.backend == "auto" and len(short) == len(counts):
        return  # nodes that all lack GPUs compute on the CPU
    for node in short:
        fewer = "set cluster.ranks_per_node to fewer, or " if counts[node] else ""
        remedy = f"{fewer}set cluster.backend=gloo to run on the CPU"
        yield Check(node, "launch.ranks", f"one for each of {max(1, needed)} ranks").fail(_gpus(counts[node]), remedy)


def needed_modules(config: RunConfig) -> tuple[str, ...]:
    """What ranks of this configuration import, torch first."""
    data, is_tokenised = config.data, config.data.format == "shards"
    conditions = {
        "tokenizers": data.tokenizer != "bytes" and not is_tokenised,
        "jinja2": data.messages_field is not None and not is_tokenised,
        "pyarrow": data.format == "parquet",
        "torchao": config.memory.moments_dtype == "int8",
        "transformers": config.model.implementation == "hf",
        "peft": config.model.lora.rank is not None,
        "tensorboard": config.train.tensorboard,
    }
    return ("torch", "numpy", "yaml", "safetensors", *(name for name, is_needed in conditions.items() if is_needed))


def _read_by_all(config: RunConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(path, endings of the files that count) of what every node reads and must find the same."""
    data = config.data
    if data.format != "stdlib":
        yield from ((path, _SUFFIXES[data.format]) for path in data.paths)
    yield from ((path, _TEXT_SUFFIXES) for path in text_files(data))
    yield from ((path, ()) for path in data.mix_paths)
    if config.model.init_from is not None:
        yield config.model.init_from, (".safetensors", ".json")


def _checkpoints_root(config: RunConfig) -> str:
    """The folder on nodes above those of each run's checkpoints; may begin with ~/."""
    folder = config.train.checkpoint.folder
    return f"{node_root(config.cluster)}/runs" if folder is None else folder.rstrip("/")


def _checkpoints(nodes: Mapping[str, NodeFacts], config: RunConfig) -> Iterator[Finding]:
    """Checkpoints fit on the disks of the nodes: on each the parts of the nodes whose disk it is."""
    if not saves_checkpoints(config):
        return
    root, shared = _checkpoints_root(config), config.cluster.shared_folder
    is_shared = shared is not None and f"{root}/".startswith(f"{shared.rstrip('/')}/")
    disks: dict[str, dict[str, int]] = {}
    for node, facts in nodes.items():
        offer = known(read_resources, facts)
        if offer is None or offer.room[0] is None:
            continue  # which `check_folder` says
        free, problem = offer.checkpoint_room
        if free is None:
            yield Check(node, CHECKPOINT).fail(problem, "set train.checkpoint.folder to a folder of yours")
        else:
            disks.setdefault(root if is_shared else offer.checkpoint_disk or node, {})[node] = free
    for free_bytes in disks.values():
        share = len(free_bytes) / (config.cluster.num_nodes or len(nodes))
        shortage = find_shortage(config, root, min(free_bytes.values()), share)
        if shortage is None:
            continue
        severity = Verdict.FAIL if shortage.is_total else Verdict.WARN
        for node in free_bytes:
            yield Check(node, CHECKPOINT).finding(severity, shortage.text, shortage.remedy)


def _source(nodes: Mapping[str, NodeFacts], source: str) -> Iterator[Finding]:
    """Some node has a checkpoint to go on from: the others are sent what they need."""
    offers = [known(read_resources, facts) for facts in nodes.values()]
    if any(offer is None or offer.has_source is not False for offer in offers):
        return
    for node in nodes:
        check = Check(node, "launch.source", "on one node at least a run folder or one of its checkpoints")
        text = f"train.checkpoint.resume_from={source} holds no checkpoints"
        yield check.fail(text, "copy them there, or name a folder that is there")


def launch_group(config: RunConfig, resumed: str | None = None) -> CheckGroup:
    """The checks of nodes that are to run `config`. resumed: id of the run, if it has begun."""
    cluster = config.cluster
    source = None if resumed else config.train.checkpoint.resume_from  # else its own checkpoints come first
    asked = {
        "root": node_root(cluster),
        "port": cluster.master_port,
        "data": [{"path": path, "suffixes": list(suffixes)} for path, suffixes in _read_by_all(config)],
        "checkpoints": _checkpoints_root(config),
        "run_id": resumed,
        "source": source,
        "model": None if resumed else config.model.init_from,
    }

    def compare(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
        found = [*_port(nodes), *_ranks(nodes), *_checkpoints(nodes, config)] if nodes else []
        return found if source is None else [*found, *_source(nodes, source)]

    def traits(facts: NodeFacts) -> Mapping[str, str | None]:
        found = {f"launch.data {path}": content for path, wrong, content in read_resources(facts).data if not wrong}
        if config.data.format != "stdlib" or facts.in_containers:
            return found
        # This corpus is the source code of the Python that reads it.
        software = known(read_software, facts)
        return {**found, "launch.python": None if software is None else f"Python {software.python}"}

    return CheckGroup(
        "launch",
        (check_adapters, check_folder, check_holder, check_data, _check_model(config)),
        questions=(*FACT_QUESTIONS, agent_question(NAME, _LIMIT_S, "cluster.agent.survey", "survey", asked)),
        settings=lambda _: {"BURST_MODULES": " ".join(needed_modules(config))},
        traits=traits,
        compare=compare,
    )
