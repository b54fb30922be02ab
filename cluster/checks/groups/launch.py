"""What only a launch asks of nodes: whose account it uses there, where runs lie, who holds the node, data, a port, GPUs
for the ranks. Made for one configuration; everything else that a launch must know other groups ask and judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.agent.folder import safe_name
from cluster.checks.finding import Check, Finding, gib
from cluster.checks.group import CheckGroup, known
from cluster.checks.groups.software import read_software
from cluster.code import agent_question
from cluster.env.facts import FACT_QUESTIONS
from cluster.plan_nodes import node_root, text_files
from cluster.remote_text import plain_path
from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import SmiFailure, SmiLog
from cluster.survey.section import fill, listed
from engine.config.settings import RunConfig

NAME = "launch.node"
ROOM_BYTES = 1 << 30
_LIMIT_S = 100
_SUFFIXES = {"text": (), "jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",), "shards": ()}
_TEXT_SUFFIXES = (".json", ".jinja")  # of what is read in a tokenizer's folder


@dataclass(frozen=True)
class Offer:
    """What a node offers a run. memory_bytes: None where it does not tell.

    room, port: (how many bytes are free, which port is free; None, and why there is none). locks: the runs that hold
    it, by the name that they know it by. data: (path, what is wrong there, its content; None: no time to look).
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


def read_offer(facts: NodeFacts) -> Offer:
    """Raises UnreadableError."""

    def take(told: Any) -> Offer:
        data = [_data(one) for one in listed(told["data"])]
        offer: Offer = fill(Offer, {**told, "home": plain_path(told["home"]), "data": data})
        return offer

    return facts.probe.section(NAME).read(take)


def _data(told: Any) -> list[str | None]:
    path, problem = told["path"], told.get("problem", "")
    if problem or told["digest"] is None:
        return [path, problem, None]
    count = f"{told['files']} file{'' if told['files'] == 1 else 's'}"
    return [path, "", f"{count}, {told['bytes']} bytes, {told['digest'][:8]}"]


def check_adapters(check: Check, facts: NodeFacts) -> list[Finding]:
    """What adapters the node has: without knowing them its ranks would be told to do without."""
    return [check.ok(f"{len(facts.adapters.ports)} ports")]


def check_folder(check: Check, facts: NodeFacts) -> list[Finding]:
    """Runs can be laid where cluster.node_folder says, and there is room for one."""
    (free, problem), root = read_offer(facts).room, node_root(facts.config)
    if free is None:
        return [check.fail(problem, "set cluster.node_folder to a folder of yours")]
    text = f"{gib(free)} free under {root}"
    if free >= ROOM_BYTES:
        return [check.ok(text)]
    return [check.expecting(f"at least {gib(ROOM_BYTES)}").fail(text, "make room, or set cluster.node_folder")]


def check_holder(check: Check, facts: NodeFacts) -> list[Finding]:
    """No run holds the node: two would share its GPUs."""
    run_id = read_offer(facts).locks.get(safe_name(facts.node))
    if run_id is None:
        return [check.ok("no run holds it")]
    remedy = f"wait for its end, end it with `burst cancel {run_id}`, or take others"
    return [check.fail(f"run {run_id} holds it", remedy)]


def check_data(check: Check, facts: NodeFacts) -> list[Finding]:
    """Every file that ranks read is there."""
    remedy = "bring it there under this name"
    missing = [check.fail(f"data {path}: {wrong}", remedy) for path, wrong, _ in read_offer(facts).data if wrong]
    return missing or [check.ok("there")]


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
        offer = known(read_offer, facts)
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


def launch_group(config: RunConfig) -> CheckGroup:
    """The checks of nodes that are to run `config`."""
    cluster = config.cluster
    asked = {
        "root": node_root(cluster),
        "port": cluster.master_port,
        "data": [{"path": path, "suffixes": list(suffixes)} for path, suffixes in _read_by_all(config)],
    }

    def traits(facts: NodeFacts) -> Mapping[str, str | None]:
        found = {f"launch.data {path}": content for path, wrong, content in read_offer(facts).data if not wrong}
        if config.data.format != "stdlib" or facts.in_containers:
            return found
        # This corpus is the source code of the Python that reads it.
        software = known(read_software, facts)
        return {**found, "launch.python": None if software is None else f"Python {software.python}"}

    return CheckGroup(
        "launch",
        (check_adapters, check_folder, check_holder, check_data),
        questions=(*FACT_QUESTIONS, agent_question(NAME, _LIMIT_S, "cluster.agent.survey", "survey", asked)),
        settings=lambda _: {"BURST_MODULES": " ".join(needed_modules(config))},
        traits=traits,
        compare=lambda nodes: [*_port(nodes), *_ranks(nodes)] if nodes else [],
    )
