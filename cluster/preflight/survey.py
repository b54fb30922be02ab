"""Asks all nodes at once what a launch must know of them; each is its own matter, none delays or hides another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.code.program import ask_program
from cluster.env.gather import FACT_QUESTIONS, read_facts
from cluster.errors import ClusterError
from cluster.plan_container import text_files
from cluster.preflight.facts import RemoteFacts, StrangeAnswerError, read_remote_facts
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import Host, Outcome, fan_out
from cluster.survey.ask import survey_node
from engine.config.errors import BurstError
from engine.config.settings import RunConfig

_SUFFIXES = {"text": (), "jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",), "shards": ()}
_TEXT_SUFFIXES = (".json", ".jinja")  # of what is read in a tokenizer's folder
_PROBE_S = 60.0
_SURVEY_S = 120.0

Connect = Callable[[Host], Connection]


@dataclass(frozen=True)
class Survey:
    """What came of every node, in the order that was asked for: facts, or why there are none."""

    nodes: tuple[str, ...]
    facts: Mapping[str, RemoteFacts] = field(default_factory=dict)
    errors: Mapping[str, BurstError] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """What nodes are asked about beside themselves. engine: empty without containers. code_root: null: below `root`."""

    config: RunConfig
    code_id: str
    code_root: str | None = None
    engine: tuple[str, ...] = ()

    def to_dict(self, node: str) -> dict[str, Any]:
        """Plain JSON values, for one node."""
        cluster = self.config.cluster
        is_bare = cluster.container.runtime == "bare"
        return {
            "node": node,
            "python": cluster.python if is_bare else None,
            "modules": list(needed_modules(self.config)) if is_bare else [],
            "root": cluster.node_folder,
            "code_root": self.code_root,
            "code_id": self.code_id,
            "port": cluster.master_port,
            "data": [{"path": path, "suffixes": list(suffixes)} for path, suffixes in _read_by_all(self.config)],
            "engine": list(self.engine),
            "image": cluster.container.image if self.engine else None,
        }


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


def survey_fleet(
    hosts: Sequence[Host],
    question: Question,
    connect: Connect,
    *,
    on_outcome: Callable[[Outcome[RemoteFacts]], None] | None = None,
) -> Survey:
    """The survey of `hosts`. Changes nothing on them."""
    width = question.config.cluster.ssh.fan_out
    outcomes = fan_out(hosts, lambda host: _ask(host, question, connect), width=width, on_outcome=on_outcome)
    return Survey(
        tuple(host.name for host in hosts),
        {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None},
        {name: outcome.error for name, outcome in outcomes.items() if outcome.error is not None},
    )


def _ask(host: Host, question: Question, connect: Connect) -> RemoteFacts:
    with connect(host) as connection:
        probe = survey_node(connection, FACT_QUESTIONS, timeout_s=_PROBE_S)
        answer = ask_program(connection, {"survey": question.to_dict(host.name)}, timeout_s=_SURVEY_S)
    try:
        facts = read_remote_facts(host.name, answer)
    except StrangeAnswerError as error:
        raise ClusterError(f"{host.name}: its answer makes no sense: {error}") from error
    facts = replace(facts, clock_offset_s=probe.clock_offset_s, clock_error_s=probe.clock_error_s)
    try:
        return replace(facts, environment=read_facts(probe, question.config.cluster, host.reached_by))
    except ClusterError as error:
        return replace(facts, environment_problem=str(error).removeprefix(f"{host.name}: "))
