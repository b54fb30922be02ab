"""What nodes answer before a launch: by the program itself over pipes, and over real SSH."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.local_connection import LocalConnection, LocalProcess
from testkit.plan_fleet import run_config

from cluster.agent.survey import find_data
from cluster.code import NoAnswerError, ask_program
from cluster.env.facts import NodeEnvironmentFacts
from cluster.errors import ClusterError, SshError, SshFailure
from cluster.preflight.judge import find_problems
from cluster.preflight.survey import (
    DataFacts,
    GpuFacts,
    ProcessFacts,
    PythonFacts,
    Question,
    RemoteFacts,
    read_remote_facts,
    survey_fleet,
)
from cluster.ssh.connection import CommandResult
from cluster.ssh.hosts import Host
from cluster.ssh.pool import SshPool
from cluster.testbed.build import Testbed
from engine.data.files import list_files

Ask = Callable[..., dict[str, Any]]
ENVIRONMENT = NodeEnvironmentFacts("n1")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder, first in PATH of the node, for tools that say what a test wants."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.fixture
def ask(tmp_path: Path, tools: Path) -> Ask:
    """The raw answer of this machine as node n1, its home in `tmp_path`."""

    def run(data: dict[str, Any] | None = None, **cluster: Any) -> dict[str, Any]:
        sections = {} if data is None else {"data": data}
        question = Question(run_config(cluster=cluster, **sections))
        environment = {"HOME": str(tmp_path), "PATH": f"{tools}:{os.environ['PATH']}"}
        with LocalConnection("n1", environment) as connection:
            return ask_program(connection, {"survey": question.to_dict("n1")}, timeout_s=60)

    return run


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def facts(answer: dict[str, Any]) -> RemoteFacts:
    return read_remote_facts("n1", answer, ENVIRONMENT)


def test_a_machine_tells_who_and_what_it_is(ask: Ask, tmp_path: Path) -> None:
    found = facts(ask(python=sys.executable))
    assert (found.home, found.uid, found.gid) == (str(tmp_path), os.getuid(), os.getgid())
    assert found.groups == tuple(sorted(os.getgroups()))
    assert (found.root, found.code_root) == (f"{tmp_path}/.burst", f"{tmp_path}/.burst/code")
    assert found.python is not None
    assert found.python.version == sys.version_info[:3]
    assert found.python.modules["torch"]
    assert found.memory_bytes is not None
    assert found.memory_bytes > 1 << 28
    assert found.disk_free_bytes is not None
    assert found.problems == {}


def test_nodes_are_asked_for_what_the_configuration_needs_of_them() -> None:
    asked = {
        "node": "n1",
        "python": "/py",
        "modules": ["torch", "numpy", "yaml", "safetensors"],
        "root": "/scratch",
        "code_root": "/shared/code",
        "port": 29500,
        "data": [{"path": "/init", "suffixes": [".safetensors", ".json"]}],
        "engine": [],
        "image": "b:1",
    }
    cluster = {"python": "/py", "node_folder": "/scratch", "master_port": 29500, "container": {"image": "b:1"}}
    bare = run_config(cluster=cluster, model={"init_from": "/init"})
    assert Question(bare, "/shared/code").to_dict("n1") == asked
    cluster["container"] = {"image": "b:1", "runtime": "docker", "command": "sudo podman"}
    docker = run_config(cluster=cluster, model={"init_from": "/init"})
    contained = {"python": None, "modules": [], "engine": ["sudo", "podman"]}
    assert Question(docker, "/shared/code").to_dict("n1") == {**asked, **contained}


def test_asking_changes_nothing(ask: Ask, tmp_path: Path) -> None:
    ask()
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_folders_of_the_configuration_are_those_of_the_nodes_user(ask: Ask, tmp_path: Path) -> None:
    assert facts(ask(node_folder="~/scratch")).root == f"{tmp_path}/scratch"
    assert facts(ask(node_folder="/scratch/me")).root == "/scratch/me"


def test_a_python_that_is_not_there_or_has_no_torch_is_told(ask: Ask, tools: Path) -> None:
    missing = facts(ask(python="/opt/none/python"))
    assert missing.python is None
    assert missing.problems["python"] == "/opt/none/python: cannot run /opt/none/python: No such file or directory"
    tool(tools, "python-without-packages", f'exec {sys.executable} -S "$@"')
    bare = facts(ask(python=str(tools / "python-without-packages")))
    assert bare.python is not None
    assert bare.python.modules == {"torch": None, "numpy": None, "yaml": None, "safetensors": None}


def test_gpus_and_who_uses_them_are_told(ask: Ask, tools: Path) -> None:
    tool(
        tools,
        "nvidia-smi",
        'case "$*" in *query-gpu*) printf "NVIDIA H100 80GB HBM3, 81559\\nNVIDIA H100 80GB HBM3, 81559\\n";; '
        f'*) printf "{os.getpid()}, 4000, python3 -c \\033[31mx\\n";; esac',
    )
    found = facts(ask())
    assert [(gpu.name, gpu.memory_mib) for gpu in found.gpus] == [("NVIDIA H100 80GB HBM3", 81559)] * 2
    assert [(one.pid, one.text) for one in found.gpu_processes] == [(os.getpid(), "python3 -c x, 4000 MiB")]


def test_a_driver_that_fails_is_no_machine_without_gpus(ask: Ask, tools: Path) -> None:
    tool(tools, "nvidia-smi", "echo 'Unable to determine the device handle for GPU0' >&2; exit 15")
    found = facts(ask())
    assert found.problems["gpus"] == "Unable to determine the device handle for GPU0"
    tool(tools, "nvidia-smi", "echo 'No devices were found'; exit 6")
    assert "gpus" not in facts(ask()).problems


def test_a_port_in_use_is_told_and_a_free_one_can_be_bound(ask: Ask) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = facts(ask(master_port=port))
    assert (taken.port, taken.problems["port"]) == (None, f"port {port}: Address already in use")
    free = facts(ask()).port
    assert free is not None
    with socket.socket() as listener:
        listener.bind(("", free))


def test_the_holder_of_the_node_is_told_while_it_lives(ask: Ask) -> None:
    folder = Path(f"/tmp/burst-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "n1.lock"
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write('{"run_id": "20260101-000000-abcdef", "pid": 7, "since": "now"}')
            file.flush()
            assert facts(ask()).lock == "20260101-000000-abcdef"
        assert facts(ask()).lock is None
    finally:
        path.unlink()


def test_processes_of_runs_are_told_only_if_both_marks_are_theirs(ask: Ask) -> None:
    def mark(node: str) -> dict[str, str]:
        return {**os.environ, "BURST_RUN_ID": f"run-of-{node}", "BURST_NODE": node}

    with (
        subprocess.Popen(["sleep", "60"], env=mark("n1")) as ours,
        subprocess.Popen(["sleep", "60"], env=mark("n2")) as other,
    ):
        try:
            found = facts(ask()).runs
        finally:
            ours.kill()
            other.kill()
    assert found == {ours.pid: "run-of-n1"}


def data_facts(folder: Path, paths: Sequence[str | Path], suffixes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What the program says of these entries of data.paths, `folder` being the home."""
    return find_data([{"path": str(path), "suffixes": list(suffixes)} for path in paths], str(folder))


def test_data_are_listed_as_the_trainer_will_list_them(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", ".hidden.jsonl", "readme.md", "sub/c.ndjson"):
        (folder / name).write_text("12345678")
    (entry,) = facts(ask({"format": "jsonl", "paths": [str(folder)]})).data
    assert (entry.files, entry.size_bytes, entry.problem) == (3, 24, "")
    files = list_files([str(folder)], (".jsonl", ".ndjson"))
    assert len(files) == entry.files
    (pattern,) = data_facts(tmp_path, ["~/corpus/*.jsonl"])
    assert (pattern["path"], pattern["files"]) == (f"{folder}/*.jsonl", 2)


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"tokenizer": "bpe"}, []),
        ({"tokenizer": "/m/tokenizer.json"}, ["/m/tokenizer.json"]),
        ({"tokenizer": "/m/tokenizer.json", "messages_field": "messages"}, ["/m"]),
        ({"messages_field": "messages", "chat_template": "chatml"}, []),
        ({"messages_field": "messages", "chat_template": "/t/mine.jinja"}, ["/t/mine.jinja"]),
    ],
)
def test_nodes_are_asked_for_what_turns_text_into_tokens(settings: dict[str, str], files: list[str]) -> None:
    config = run_config(data={"format": "jsonl", "paths": ["/chats.jsonl"], **settings})
    asked = Question(config).to_dict("n1")["data"]
    assert [entry["path"] for entry in asked] == ["/chats.jsonl", *files]


def test_data_that_are_missing_or_empty_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = data_facts(tmp_path, ["/none/a.txt", tmp_path / "empty", "/none/*.txt"])
    assert [one["problem"] for one in found] == [
        "no such file or folder",
        "holds no such files",
        "no such file or folder",
    ]


def test_a_file_that_differs_at_its_start_or_end_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        return str(data_facts(tmp_path, [path])[0]["digest"])

    body = b"x" * (3 << 20)
    same = digest(body)
    assert digest(body) == same
    assert digest(b"y" + body[1:]) != same
    assert digest(body[:-1] + b"y") != same
    assert digest(body + b"x") != same


def test_an_engine_and_its_image_are_told(ask: Ask, tools: Path) -> None:
    container = {"runtime": "docker", "image": "burst:1"}
    image = json.dumps(
        [{"Id": "sha256:1", "Architecture": "amd64", "Os": "linux", "Config": {}, "RootFS": {"Layers": []}}]
    )
    tool(
        tools,
        "docker",
        f"""case "$1" in version) echo '{{"Client":{{}},"Server":{{"Version":"28.2"}}}}';; *) echo '{image}';; esac""",
    )
    found = facts(ask(container=container))
    assert found.image is not None
    assert (len(found.image), found.problems) == (64, {})
    missing = "echo 'Error: No such image: x' >&2; exit 1"
    tool(tools, "docker", f"""[ "$1" = version ] && echo '{{"Server":{{"Version":"1"}}}}' && exit; {missing}""")
    assert facts(ask(container=container)).image is None
    tool(tools, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    assert facts(ask(container=container)).problems["engine"] == "Cannot connect to the Docker daemon"


def test_a_login_that_talks_does_not_spoil_the_answer(tmp_path: Path, tools: Path) -> None:
    real = subprocess.run(["sh", "-c", "command -v python3"], capture_output=True, text=True).stdout.strip()
    tool(tools, "python3", f'echo "Welcome to n1!"; {real} "$@"; code=$?; echo bye; exit $code')
    with LocalConnection("n1", {"PATH": f"{tools}:{os.environ['PATH']}"}) as connection:
        answer = ask_program(connection, {"survey": Question(run_config()).to_dict("n1")}, timeout_s=60)
    assert facts(answer).node == "n1"


@pytest.mark.parametrize(
    ("code", "said", "is_python_missing"),
    [
        (127, b"sh: python3: not found", True),
        (1, b"burst needs Python 3.9 or newer as python3", True),
        (1, b"Traceback: \x1b[31mboom", False),
        (None, b"", False),
    ],
)
def test_a_node_on_which_nothing_answers_says_why(code: int | None, said: bytes, is_python_missing: bool) -> None:
    with Ending(code, said) as connection, pytest.raises(NoAnswerError) as caught:
        ask_program(connection, {"survey": {}}, timeout_s=60)
    assert caught.value.is_python_missing is is_python_missing
    assert "\x1b" not in str(caught.value)


class Ending(LocalConnection):
    """A node on which every command ends so."""

    def __init__(self, code: int | None, said: bytes) -> None:
        super().__init__("n1")
        self._result = CommandResult(code, b"", said)

    def start(self, argv: Sequence[str]) -> LocalProcess:
        process = super().start(("true",))
        process.wait = lambda timeout_s: self._result  # type: ignore[method-assign]
        return process


GOOD: dict[str, Any] = {
    "home": "/home/me",
    "user": "me",
    "uid": 1,
    "gid": 2,
    "groups": [4, 20],
    "root": "/home/me/.burst",
    "code_root": "/home/me/.burst/code",
    "python": {"executable": "/usr/bin/python3", "version": "3.11.2", "modules": {"torch": "2.13", "numpy": None}},
    "gpus": [{"name": "H100", "memory_mib": 3}],
    "gpu_processes": [{"pid": 5, "mib": "6", "name": "python3", "user": "bob"}],
    "memory_bytes": 7,
    "disk": 9,
    "port": 10,
    "lock": {"run_id": "r"},
    "runs": [{"pid": 11, "run_id": "s"}],
    "data": [{"path": "/a", "files": 12, "bytes": 13, "digest": "d"}, {"path": "/b", "problem": "none"}],
    "image": "1d",
    "has_infiniband_devices": True,
    "engine_problem": "dead",
}


def test_a_whole_answer_is_facts() -> None:
    assert facts(GOOD) == RemoteFacts(
        node="n1",
        home="/home/me",
        user="me",
        uid=1,
        gid=2,
        root="/home/me/.burst",
        code_root="/home/me/.burst/code",
        environment=ENVIRONMENT,
        groups=(4, 20),
        python=PythonFacts("/usr/bin/python3", (3, 11, 2), {"torch": "2.13", "numpy": None}),
        gpus=(GpuFacts("H100", 3),),
        gpu_processes=(ProcessFacts(5, "bob", "python3, 6 MiB"),),
        memory_bytes=7,
        disk_free_bytes=9,
        port=10,
        lock="r",
        runs={11: "s"},
        data=(DataFacts("/a", 12, 13, "d"), DataFacts("/b", problem="none")),
        image="1d",
        has_infiniband_devices=True,
        problems={"engine": "dead"},
    )


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(GOOD)), value=ODD | st.dictionaries(st.sampled_from(["run_id", "name", "path"]), ODD))
def test_an_answer_that_lies_is_facts_or_a_strange_answer(key: str, value: Any) -> None:
    try:
        found = facts({**GOOD, key: value})
    except ClusterError:
        return
    assert "\x1b" not in repr(found)
    assert found.root.startswith("/")


def test_paths_that_would_leave_their_folder_are_no_answer() -> None:
    for root in ("relative", "/home/../etc", "/home/\x1b[31mme", "/a\nb"):
        with pytest.raises(ClusterError, match=r"n1: its answer makes no sense: .*no absolute path"):
            facts({**GOOD, "root": root})


def test_nodes_of_a_testbed_are_fit_and_one_that_is_silent_does_not_hide_them(testbed4: Testbed) -> None:
    gone = Host("gone", "127.0.0.1", port=1, connect_timeout_s=3.0)
    config = run_config(cluster={"interface": "eth0"})
    with SshPool() as pool:
        found = survey_fleet([*testbed4.hosts(), gone], Question(config), pool.connect)
    assert list(found.facts) == list(testbed4.node_names)
    error = found.errors["gone"]
    assert isinstance(error, SshError)
    assert error.kind is SshFailure.REFUSED
    assert {facts.environment.address for facts in found.facts.values()} == {node.address for node in testbed4.nodes}
    assert len({facts.root for facts in found.facts.values()}) == 4
    assert [problem.nodes for problem in find_problems(found, config)] == [("gone",)]
