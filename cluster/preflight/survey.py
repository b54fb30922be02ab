"""What a launch knows of a node far away: facts from its answer, cleaned and checked, for it may be anything.

Asks all nodes at once what a launch must know of them; each is its own matter, none delays or hides another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.code import ask_program
from cluster.env.facts import NodeEnvironmentFacts
from cluster.env.gather import FACT_QUESTIONS, read_facts
from cluster.errors import ClusterError
from cluster.plan_nodes import engine_words, text_files
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import Host, fan_out
from cluster.survey.ask import survey_node
from engine.config.errors import BurstError
from engine.config.settings import RunConfig

_MAX_ITEMS = 256
_TEXT = 400


@dataclass(frozen=True)
class PythonFacts:
    """The Python of the ranks. modules: version by name, "" if it does not say; None: not installed."""

    executable: str
    version: tuple[int, ...]
    modules: Mapping[str, str | None]

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as nvidia-smi names it."""

    name: str
    memory_mib: int


@dataclass(frozen=True)
class ProcessFacts:
    """A process on the GPUs of a node."""

    pid: int
    user: str
    text: str


@dataclass(frozen=True)
class DataFacts:
    """What one entry of data.paths is on a node. digest: None when there was no time to read its edges."""

    path: str
    files: int = 0
    size_bytes: int = 0
    digest: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class RemoteFacts:
    """One node that answered. What is not known has an entry in `problems`, by the name of the survey.

    root: where the node keeps runs. lock: id of the run that holds the node. runs: processes of runs, pid -> run id.
    image: its identity. clock_offset_s: its clock minus ours; clock_error_s: how wrong that may be.
    """

    node: str
    home: str
    user: str
    uid: int
    gid: int
    root: str
    code_root: str
    environment: NodeEnvironmentFacts
    groups: tuple[int, ...] = ()
    python: PythonFacts | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_processes: tuple[ProcessFacts, ...] = ()
    memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    port: int | None = None
    lock: str | None = None
    runs: Mapping[int, str] = field(default_factory=dict)
    data: tuple[DataFacts, ...] = ()
    image: str | None = None
    has_infiniband_devices: bool = False
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0
    problems: Mapping[str, str] = field(default_factory=dict)


def read_remote_facts(node: str, answer: Mapping[str, Any], environment: NodeEnvironmentFacts) -> RemoteFacts:
    """The facts in `answer`. Raises ClusterError when it is no answer to the survey."""
    told = {key.removesuffix("_problem"): value for key, value in answer.items() if key.endswith("_problem")}
    try:
        return RemoteFacts(
            node=node,
            home=_path(answer["home"]),
            user=_text(answer["user"]),
            uid=_whole(answer["uid"]),
            gid=_whole(answer["gid"]),
            root=_path(answer["root"]),
            code_root=_path(answer["code_root"]),
            environment=environment,
            groups=tuple(_whole(one) for one in _items(answer, "groups")),
            python=_python(answer.get("python")),
            gpus=tuple(GpuFacts(_text(one["name"]), _whole(one["memory_mib"])) for one in _items(answer, "gpus")),
            gpu_processes=tuple(_gpu_process(one) for one in _items(answer, "gpu_processes")),
            memory_bytes=_optional(answer.get("memory_bytes")),
            disk_free_bytes=_optional(answer.get("disk")),
            port=_optional(answer.get("port")),
            lock=_run_id(answer["lock"]) if answer.get("lock") else None,
            runs={_whole(one["pid"]): _run_id(one) for one in _items(answer, "runs")},
            data=tuple(_data(one) for one in _items(answer, "data")),
            image=_text(answer["image"]) if answer.get("image") else None,
            has_infiniband_devices=answer.get("has_infiniband_devices") is True,
            problems={name: _text(value) for name, value in told.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        said = one_line(f"{type(error).__name__}: {error}", 200)
        raise ClusterError(f"{node}: its answer makes no sense: {said}") from None


def _python(found: Any) -> PythonFacts | None:
    if found is None:
        return None
    version = re.fullmatch(r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})", _text(found["version"]))
    if version is None:
        raise ValueError("no version of Python")
    modules = {_text(name): None if one is None else _text(one) for name, one in dict(found["modules"]).items()}
    return PythonFacts(_path(found["executable"]), tuple(map(int, version.groups())), modules)


def _gpu_process(found: Any) -> ProcessFacts:
    text = f"{_text(found['name'])}, {_text(found['mib'])} MiB"
    return ProcessFacts(_whole(found["pid"]), _text(found["user"]), text)


def _run_id(found: Any) -> str:
    return one_line(str(found.get("run_id", "?")), 60) or "?"


def _data(found: Any) -> DataFacts:
    if found.get("problem"):
        return DataFacts(_text(found["path"]), problem=_text(found["problem"]))
    digest = None if found["digest"] is None else _text(found["digest"])
    return DataFacts(_text(found["path"]), _whole(found["files"]), _whole(found["bytes"]), digest)


def _items(answer: Mapping[str, Any], name: str) -> list[Any]:
    found = answer.get(name) or []
    if not isinstance(found, list):
        raise TypeError(f"{name} is no list")
    return found[:_MAX_ITEMS]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r:.60}")
    return one_line(value, _TEXT)


def _path(value: Any) -> str:
    """An absolute path that a command line and a file of ours can hold."""
    text = _text(value)
    if not text.startswith("/") or text != value or ".." in text.split("/"):
        raise ValueError(f"no absolute path: {text!r}")
    return text


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise TypeError(f"expected a whole number, got {value!r:.60}")
    return value


def _optional(value: Any) -> int | None:
    return None if value is None else _whole(value)


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
    """What nodes are asked about beside themselves. code_root: None: below the folder where a node keeps runs."""

    config: RunConfig
    code_root: str | None = None

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
            "port": cluster.master_port,
            "data": [{"path": path, "suffixes": list(suffixes)} for path, suffixes in _read_by_all(self.config)],
            "engine": [] if is_bare else list(engine_words(cluster.container.command)),
            "image": cluster.container.image,
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
) -> Survey:
    """The survey of `hosts`. Changes nothing on them."""
    outcomes = fan_out(hosts, lambda host: _ask(host, question, connect))
    return Survey(
        tuple(host.name for host in hosts),
        {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None},
        {name: outcome.error for name, outcome in outcomes.items() if outcome.error is not None},
    )


def _ask(host: Host, question: Question, connect: Connect) -> RemoteFacts:
    with connect(host) as connection:
        probe = survey_node(connection, FACT_QUESTIONS, timeout_s=_PROBE_S)
        answer = ask_program(connection, {"survey": question.to_dict(host.name)}, timeout_s=_SURVEY_S)
    environment = read_facts(probe, question.config.cluster, host.reached_by)
    facts = read_remote_facts(host.name, answer, environment)
    return replace(facts, clock_offset_s=probe.clock_offset_s, clock_error_s=probe.clock_error_s)
