"""What keeps nodes from carrying a run: each problem by its words, and all of them at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from testkit.plan_fleet import PYTHON, node, nodes, run_config, survey

from cluster.code import NoAnswerError
from cluster.env.facts import NodeEnvironmentFacts
from cluster.errors import SshError, SshFailure
from cluster.preflight.judge import NodeProblem, UnfitNodesError, check_survey, find_problems
from cluster.preflight.survey import DataFacts, ProcessFacts, RemoteFacts
from engine.config.settings import RunConfig

BARE = run_config()
DOCKER = run_config(cluster={"container": {"runtime": "docker", "image": "burst:1"}})
NCCL = run_config(cluster={"backend": "nccl", "ranks_per_node": 4})
OLD = dataclasses.replace(PYTHON, version=(3, 9, 2))
NEWER = dataclasses.replace(PYTHON, version=(3, 12, 1))
NO_TORCH = dataclasses.replace(PYTHON, modules={**PYTHON.modules, "torch": None, "yaml": None})
OTHER_TORCH = dataclasses.replace(PYTHON, modules={**PYTHON.modules, "torch": "2.11.0"})


def told(*found: RemoteFacts, config: RunConfig = BARE) -> list[str]:
    return [str(problem) for problem in find_problems(survey(*found), config)]


@pytest.mark.parametrize(
    ("section", "changes", "module"),
    [
        ("data", {"tokenizer": "bpe"}, "tokenizers"),
        ("data", {"tokenizer": "bpe", "format": "shards"}, None),
        ("data", {"format": "jsonl", "messages_field": "messages"}, "jinja2"),
        ("data", {"format": "parquet"}, "pyarrow"),
        ("memory", {"moments_dtype": "int8"}, "torchao"),
        ("train", {"tensorboard": True}, "tensorboard"),
    ],
)
def test_modules_that_only_some_runs_import_are_asked_for_by_those(section, changes, module) -> None:
    config = run_config(**{section: changes})
    problems = [text for text in told(*nodes(1, python=PYTHON), config=config) if " has no " in text]
    assert [text.split(" has no ")[1].partition(";")[0] for text in problems] == ([module] if module else [])


def test_healthy_nodes_have_no_problem() -> None:
    assert told(*nodes(4)) == []
    assert told(*nodes(4, gpus=8), config=NCCL) == []
    assert told(*nodes(4, image="1d" * 32), config=DOCKER) == []


@pytest.mark.parametrize(
    ("config", "facts", "text", "is_risk"),
    [
        (
            BARE,
            {"lock": "20260101-000000-abcdef"},
            "run 20260101-000000-abcdef holds it; wait for its end, end it with `burst cancel 20260101-000000-abcdef`, "
            "or take others",
            True,
        ),
        (
            BARE,
            {"runs": {7: "r1", 8: "r1"}},
            "2 processes are left of run r1 (pid 7 8); `burst cancel r1` ends what is left",
            True,
        ),
        (
            NCCL,
            {"gpus": 8, "gpu_processes": (ProcessFacts(9, "bob", "python3, 4000 MiB"),)},
            "its GPUs are in use: python3, 4000 MiB (pid 9, bob); wait for their end, or take other nodes",
            True,
        ),
        (
            BARE,
            {"python": None, "problems": {"python": "/opt/none: cannot run it"}},
            "no Python for the ranks: /opt/none: cannot run it; set cluster.python to one, or use "
            "cluster.container.runtime=docker",
            False,
        ),
        (
            BARE,
            {"python": OLD},
            "/opt/venv/bin/python is Python 3.9.2, ranks need 3.11 or newer; set cluster.python to one, or use "
            "cluster.container.runtime=docker",
            False,
        ),
        (
            BARE,
            {"python": NO_TORCH},
            "/opt/venv/bin/python has no torch, yaml; install it there, or set cluster.python to one that has",
            False,
        ),
        (
            DOCKER,
            {"problems": {"engine": "cannot run docker: No such file or directory"}},
            "the container engine cannot be used: cannot run docker: No such file or directory "
            "(cluster.container.command)",
            False,
        ),
        (DOCKER, {}, "it has no image burst:1; run `burst image push`", False),
        (
            BARE,
            {"disk_free_bytes": 500 << 20},
            "500 MiB free under /home/me/.burst, expected 1024; make room, or set cluster.node_folder",
            True,
        ),
        (
            BARE,
            {"disk_free_bytes": 3 << 20},
            "3 MiB free under /home/me/.burst, expected 1024; make room, or set cluster.node_folder",
            False,
        ),
        (
            BARE,
            {"disk_free_bytes": None, "problems": {"disk": "/home/me is not writable"}},
            "/home/me is not writable; set cluster.node_folder to a folder of yours",
            False,
        ),
        (BARE, {"clock_offset_s": -7.0}, "its clock is 7 s behind; set it (chrony, ntp)", True),
        (
            BARE,
            {"data": (DataFacts("/data/a.txt", problem="no such file or folder"),)},
            "data /data/a.txt: no such file or folder; bring it there under this name",
            False,
        ),
        (
            BARE,
            {"environment": NodeEnvironmentFacts("n1", interface_reason="there is no interface ib9; there are lo")},
            "no address for the other nodes: there is no interface ib9; there are lo; set cluster.interface",
            False,
        ),
        (
            BARE,
            {"port": None, "problems": {"port": "port 29500: Address already in use"}},
            "no port for the rendezvous: port 29500: Address already in use; free it, or set cluster.master_port to "
            "another one (null: any)",
            False,
        ),
        (
            NCCL,
            {"gpus": 2},
            "2 GPUs for 4 ranks; set cluster.ranks_per_node to fewer, or cluster.backend=gloo to run on the CPU",
            False,
        ),
    ],
)
def test_a_problem_is_named_with_what_to_do(config: RunConfig, facts: dict[str, Any], text: str, is_risk: bool) -> None:
    (problem,) = find_problems(survey(node("n1", **facts)), config)
    assert str(problem) == f"n1: {text}"
    assert problem.is_risk is is_risk


def test_what_several_nodes_have_is_said_once() -> None:
    full = "10 MiB free under /home/me/.burst, expected 1024; make room, or set cluster.node_folder"
    assert told(*nodes(3, disk_free_bytes=10 << 20), node("n4", 4)) == [f"n[1-3]: {full}"]


def test_all_problems_are_told_at_once() -> None:
    sick = node("n1", 1, python=OLD, disk_free_bytes=0, clock_offset_s=60.0)
    assert [text.partition("; ")[0] for text in told(sick, node("n2", 2, lock="r9"))] == [
        "n2: run r9 holds it",
        "n1: 0 MiB free under /home/me/.burst, expected 1024",
        "n1: its clock is 60 s ahead",
        "n1: /opt/venv/bin/python is Python 3.9.2, ranks need 3.11 or newer",
        "n[1-2]: Python differs: 3.9.2 on n1",
    ]


def test_only_the_first_node_needs_a_port() -> None:
    assert told(node("n1", 1), node("n2", 2, port=None)) == []


def test_a_clock_that_may_be_right_is_not_blamed() -> None:
    assert told(node("n1", clock_offset_s=5.5, clock_error_s=1.0)) == []


def test_processes_of_the_run_that_holds_the_node_are_no_leftover() -> None:
    (text,) = told(node("n1", lock="r1", runs={7: "r1"}))
    assert text.startswith("n1: run r1 holds it")


def test_processes_of_runs_on_the_gpus_are_not_told_as_somebody_elses() -> None:
    own, other = ProcessFacts(7, "me", "python3, 4000 MiB"), ProcessFacts(9, "bob", "python3, 5000 MiB")
    facts = {"gpus": 8, "lock": "r1", "runs": {7: "r1"}}
    held = told(node("n1", gpu_processes=(own,), **facts), config=NCCL)
    assert told(node("n1", gpu_processes=(own, other), **facts), config=NCCL) == [
        *held,
        "n1: its GPUs are in use: python3, 5000 MiB (pid 9, bob); wait for their end, or take other nodes",
    ]


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        (BARE, {"python": NEWER}, "Python differs: 3.11.7 on n[1-2]; 3.12.1 on n3; set cluster.python to the same one"),
        (BARE, {"python": OTHER_TORCH}, "torch differs: 2.13.0 on n[1-2]; 2.11.0 on n3; install the same version"),
        (
            DOCKER,
            {"image": "ff" * 32},
            "image burst:1 differs: 111111111111 on n[1-2]; ffffffffffff on n3; run `burst image push`",
        ),
    ],
)
def test_versions_that_differ_are_a_risk_that_names_who_has_which(
    config: RunConfig, changes: dict[str, Any], text: str
) -> None:
    (problem,) = find_problems(survey(*nodes(2, image="11" * 32), node("n3", 3, **changes)), config)
    assert str(problem) == f"n[1-3]: {text} on all"
    assert problem.is_risk


def test_a_corpus_made_of_the_standard_library_needs_the_very_same_python() -> None:
    patched = node("n2", 2, python=dataclasses.replace(PYTHON, version=(3, 11, 9)))
    data = {"format": "text", "paths": ["/a"]}
    assert "3.11.7 on n1; 3.11.9 on n2" in told(node("n1", 1), patched)[0]
    assert told(node("n1", 1), patched, config=run_config(data=data)) == []


def test_data_that_differ_between_nodes_are_named_with_their_sizes() -> None:
    same, other = DataFacts("/d", 1, 10, "aaaaaaaaaa"), DataFacts("/d", 1, 11, "bbbbbbbbbb")
    assert told(node("n1", 1, data=(same,)), node("n2", 2, data=(same,)), node("n3", 3, data=(other,))) == [
        "n[1-3]: data /d differs: 1 file, 10 bytes, aaaaaaaa on n[1-2]; 1 file, 11 bytes, bbbbbbbb on n3; "
        "give all nodes the same files"
    ]
    unread = dataclasses.replace(other, digest=None)
    assert told(node("n1", 1, data=(same,)), node("n2", 2, data=(unread,))) == []


def test_numbers_of_gpus_that_differ_need_a_decision() -> None:
    mixed = (*nodes(2, gpus=8), node("n3", 3, gpus=4))
    assert told(*mixed) == [
        "n[1-3]: 8 GPUs on n[1-2]; 4 GPUs on n3; set cluster.ranks_per_node, or take nodes that are alike"
    ]
    assert told(*mixed, config=run_config(cluster={"ranks_per_node": 4})) == []
    assert told(*mixed, config=run_config(cluster={"backend": "gloo"})) == []
    five = told(*mixed, config=run_config(cluster={"ranks_per_node": 5}))
    assert five[0].startswith("n3: 4 GPUs for 5 ranks; ")


def test_a_fleet_without_gpus_runs_on_the_cpu_unless_nccl_was_asked_for() -> None:
    assert told(*nodes(2), config=run_config(cluster={"ranks_per_node": 2})) == []
    asked = told(*nodes(2), config=run_config(cluster={"backend": "nccl"}))
    assert asked == [
        "n[1-2]: no GPU, but cluster.backend=nccl needs one per rank; set cluster.backend=gloo to run on the CPU"
    ]


def test_gpus_that_cannot_be_counted_do_not_pass() -> None:
    (text,) = told(node("n1", problems={"gpus": "Unable to determine the device handle"}), config=NCCL)
    assert text == "n1: its GPUs are not known: Unable to determine the device handle"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SshError("n2", SshFailure.REFUSED, "connection refused", "is sshd up?"), "connection refused; is sshd up?"),
        (NoAnswerError("python3 there ended with 1"), "python3 there ended with 1"),
    ],
)
def test_a_node_that_does_not_answer_says_why(error: Exception, text: str) -> None:
    (problem,) = find_problems(survey(node("n1"), n2=error), BARE)  # type: ignore[arg-type]
    assert problem == NodeProblem(("n2",), text)


def test_nodes_that_are_unreachable_alike_are_told_once_by_the_first_ones_words() -> None:
    def refused(number: int) -> SshError:
        return SshError(f"n{number}", SshFailure.REFUSED, f"10.0.0.{number} port 22 refuses connections", "is it up?")

    found = survey(n1=refused(1), n2=refused(2), n3=SshError("n3", SshFailure.TIMEOUT, "10.0.0.3 is silent"))
    assert [str(problem) for problem in find_problems(found, BARE)] == [
        "n[1-2]: 10.0.0.1 port 22 refuses connections; is it up?",
        "n3: 10.0.0.3 is silent",
    ]


def test_force_makes_risks_warnings_and_nothing_else() -> None:
    risky, broken = node("n1", 1, lock="r1"), node("n2", 2, disk_free_bytes=None, problems={"disk": "read-only"})
    with pytest.raises(UnfitNodesError) as caught:
        check_survey(survey(risky), BARE)
    assert str(caught.value).endswith("To start all the same, add --force.")
    assert caught.value.exit_code == 1
    assert check_survey(survey(risky), BARE, force=True)[0].startswith("n1: run r1 holds it")
    with pytest.raises(UnfitNodesError) as caught:
        check_survey(survey(risky, broken), BARE, force=True)
    assert str(caught.value) == "n2: read-only; set cluster.node_folder to a folder of yours"
    assert "--force" not in str(caught.value)
