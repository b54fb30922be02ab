"""What the task of a node does before it is a supervisor: who it is, where ranks meet, what it writes down."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from testkit import PYTHON_PATH, write_program
from testkit.known_facts import known_facts

from cluster.control.runner import read_run_plan
from cluster.errors import ClusterError
from cluster.launch.local import probe_local_node
from cluster.launch.slurm.node_task import MEETING_FILE, SlurmTask, main, node_address, prepare, read_task
from cluster.launch.slurm.plan import GRANTED_FILE, build_slurm_plan, granted_plan, slurm_target, write_granted
from cluster.launch.slurm.time_limit import main as time_limit
from cluster.plan import LaunchPlan, NodePlan, PlanFileError, plan_text
from cluster.survey.network import NetInterface
from engine.config.cluster import ClusterConfig
from engine.config.settings import DataConfig, RunConfig
from engine.runs.folder import RunFolder, create_run

TASK = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4", "SLURMD_NODENAME": "n2"}
EARLIER = json.dumps({"token": "old", "address": "10.0.0.1", "port": 1})  # where the ranks of another attempt met
SITE = slurm_target(probe_local_node(), "", "", Path("/"))


@pytest.fixture
def plan(tmp_path) -> LaunchPlan:
    """Two nodes with two ranks each; the run folder is there, and the token of the attempt is t."""
    config = RunConfig(
        data=DataConfig(format="text", paths=("/dev/null",)),
        cluster=ClusterConfig(num_nodes=2, ranks_per_node=2, backend="gloo"),
    )
    path = tmp_path / "runs" / "tiny" / "20260131-120000-abc123"
    plan = build_slurm_plan(config, probe_local_node(), path, environment={})
    create_run(path, dict(plan.files))
    (path / "slurm.token").write_text("t\n")
    return plan


def begin(plan: LaunchPlan, rank: int, token: str = "t") -> NodePlan:
    """What the task of a node does before it is a supervisor."""
    name, address = f"n{rank + 1}", f"127.0.0.{rank + 1}"
    site = replace(SITE, name=name, address=address, folder=plan.run_path)
    return prepare(plan, SlurmTask(name, rank, 2), token, site, "engine.train")


def grant(run: RunFolder, node: NodePlan, folder: str, token: str = "t") -> None:
    """Have a node written down, in a folder of any name."""
    (run.path / "nodes" / folder).mkdir(parents=True)
    write_granted(run, replace(node, name=folder), token)
    path = run.path / "nodes" / folder / GRANTED_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "node": node.to_dict()}))


def test_a_task_knows_its_node_by_what_srun_says():
    assert read_task("n2", TASK) == SlurmTask("n2", 1, 2)
    assert read_task("n1", {"SLURM_NODEID": "0", "SLURM_NNODES": "4"}) == SlurmTask("n1", 0, 4)
    for name, change in (*(("n2", {"SLURM_NODEID": number}) for number in ("", "2", "-1")), ("a/../b", {})):
        with pytest.raises(ClusterError):
            read_task(name, {**TASK, **change})


@pytest.mark.parametrize(
    ("token", "environment", "code", "told"),
    [
        *(("t", {}, 1, "not a task of srun"), ("other", TASK, 66, "n2 does not see the run folder")),
        ("t", {**TASK, "SLURM_STEP_NUM_NODES": "3"}, 1, "burst: n2: the job has 3 nodes, the plan 2"),
    ],
)
def test_a_task_that_cannot_begin_says_so_and_leaves_nothing(plan, capsys, token, environment, code, told):
    before = os.umask(0o022)
    assert main([plan.run_path, token, "engine.train"], environment) == code
    assert os.umask(before) == 0o077
    assert told in capsys.readouterr().err
    assert not (Path(plan.run_path) / "nodes").exists()


def test_a_task_looks_at_its_node_before_it_agrees_with_others(plan, capsys, monkeypatch):
    plan = replace(plan, config=replace(plan.config, cluster=replace(plan.config.cluster, interface="nope0")))
    Path(plan.run_path, "launch.json").write_text(plan_text(plan))
    assert main([plan.run_path, "t", "engine.train"], TASK) == 1
    told = "burst: n2: no address for the other nodes: there is no interface nope0; there are "
    assert capsys.readouterr().err.startswith(told)
    monkeypatch.setenv("PATH", str(write_program(Path(plan.run_path) / "bin" / "sh", "exit 3").parent))
    assert main([plan.run_path, "t", "engine.train"], TASK) == 1
    assert "cannot tell what network it has" in capsys.readouterr().err
    assert not Path(plan.run_path, "nodes").exists()


def test_a_warning_of_the_time_limit_waits_for_nodes_that_get_the_address_and_port_of_the_first(plan):
    run = RunFolder(Path(plan.run_path))
    (run.path / MEETING_FILE).write_text(EARLIER)
    stop = [sys.executable, "-m", "cluster.launch.slurm.time_limit", plan.run_path, "t", "stop"]
    with subprocess.Popen(stop, env={**os.environ, "PYTHONPATH": PYTHON_PATH}) as warning:
        time.sleep(1)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda rank: begin(plan, rank), (1, 0)))
        assert warning.wait(200) == 0

    stops = [json.loads((run.path / "nodes" / name / "stop.json").read_text()) for name in ("n1", "n2")]
    assert stops == [{"cause": "time limit", "grace_s": plan.config.train.checkpoint.stop_grace_s}] * 2
    granted = granted_plan(plan, run, "t")
    assert granted is not None
    assert [(node.name, node.first_rank) for node in granted.nodes] == [("n1", 0), ("n2", 2)]
    meetings = {tuple(word for word in node.argv if word.startswith("--master-")) for node in granted.nodes}
    ((address, port),) = meetings
    assert address == "--master-addr=127.0.0.1"
    with socket.create_server(("127.0.0.1", int(port.removeprefix("--master-port=")))):
        pass  # it is free


@pytest.mark.parametrize(
    ("saved", "most", "state", "told", "goes_on"),
    [
        pytest.param("", 1, "failed", 0, True, marks=pytest.mark.thorough),  # it waits for a launcher
        ("-", 1, "failed", 1, False),
        ("+", 1, "failed", 1, False),
        ("-+", 2, "cancelled", 0, False),  # what has saved begins anew
        ("", 1, "cancelled", 0, False),
        ("", 1, "completed", 0, False),
        ("", 1, "given to another job", 0, False),
    ],
)
def test_a_job_whose_launcher_is_gone_begins_the_next_attempt_as_a_launcher_would(
    plan, saved, most, state, told, goes_on, capfd
):
    """saved: whether earlier attempts did; this one has not."""
    plan = replace(plan, config=replace(plan.config, cluster=replace(plan.config.cluster, max_restarts=most)))
    run = RunFolder(Path(plan.run_path))
    (run.path / "launch.json").write_text(plan_text(plan))
    for mark in (*saved, " "):
        run.transition("starting")
        run.transition("running")
        if mark == "+":
            run.append_event("checkpoint", step=1)
        run.transition(state if mark == " " and " " not in state else "failed")
    if " " in state:
        threading.Timer(0.5, (run.path / "slurm.token").write_text, ("other\n",)).start()
    code = time_limit([plan.run_path, "t", "go-on"], {"PATH": "/nowhere", "PYTHONPATH": PYTHON_PATH})

    said = capfd.readouterr().err
    assert (said.count(f"no further checkpoint after {most} restarts in a row"), "it had ended" in said) == (
        told,
        goes_on,
    )
    assert goes_on or code == 0
    assert time_limit([plan.run_path, "older", "go-on"], {}) == 1
    assert capfd.readouterr().err == f"burst: go-on: {run.path} has been given to another job since\n"


def test_a_node_alone_needs_no_network_and_several_need_one():
    facts = known_facts("n1", reason="eth0 is down")

    assert node_address(SlurmTask("n1", 0, 1), facts) == "127.0.0.1"
    with pytest.raises(ClusterError, match=r"eth0 is down; set cluster.interface"):
        node_address(SlurmTask("n1", 0, 2), facts)
    eth0 = NetInterface("eth0", is_up=True, addresses=("10.0.0.1/24",))
    assert node_address(SlurmTask("n1", 0, 2), known_facts("n1", interface=eth0)) == "10.0.0.1"


def test_the_meeting_of_an_earlier_attempt_is_not_heeded_and_what_its_supervisor_left_is_removed(plan):
    run = Path(plan.run_path)
    folder = run / "nodes" / "n1"
    folder.mkdir(parents=True)
    for name in ("supervisor", "outcome", "health", "stop", "stacks", "stacks_done"):
        (folder / f"{name}.json").write_text("{}")
    (folder / "lease").touch()
    (run / MEETING_FILE).write_text(EARLIER)
    node = begin(plan, 0, "new")

    assert "--master-addr=127.0.0.1" in node.argv
    assert json.loads((run / MEETING_FILE).read_text())["token"] == "new"
    assert [path.name for path in folder.iterdir()] == [GRANTED_FILE]
    assert (run / node.env_file).parent.stat().st_mode & 0o777 == 0o700
    assert "BURST_NODE=n1\n" in (run / node.env_file).read_text()


def test_a_plan_has_its_nodes_only_when_all_of_this_attempt_are_there(plan):
    config = replace(plan.config, cluster=replace(plan.config.cluster, num_nodes=11))
    plan = build_slurm_plan(config, probe_local_node(), Path(plan.run_path), environment={})  # more than one digit
    run = RunFolder(Path(plan.run_path))
    *others, last = plan.nodes
    for node in others:
        grant(run, node, node.name)
    grant(run, last, last.name, "old")
    path = run.path / "nodes" / last.name / GRANTED_FILE
    assert granted_plan(plan, run, "t") is None
    write_granted(run, last, "t")
    text = path.read_text()
    path.write_text(text.ljust((1 << 20) + 1))
    assert granted_plan(plan, run, "t") is None  # no node has so much to say
    path.write_text(text.ljust(1 << 20))
    granted = granted_plan(plan, run, "t")
    assert granted is not None
    assert (granted.nodes, dict(granted.files)) == (plan.nodes, {"launch.json": dict(plan.files)["launch.json"]})


@pytest.mark.parametrize("change", [{"first_rank": 1}, {"local_ranks": 3}, {"folder": "../x"}, {"name": "slurm-node0"}])
def test_nodes_that_make_no_plan_are_refused(plan, change):
    run = RunFolder(Path(plan.run_path))
    grant(run, plan.nodes[0], "one")
    grant(run, replace(plan.nodes[1], **change), "two")
    with pytest.raises(PlanFileError):
        granted_plan(plan, run, "t")


def test_who_reads_the_plan_of_a_run_gets_the_real_nodes(plan):
    run = RunFolder(Path(plan.run_path))
    assert [node.name for node in read_run_plan(run.path).nodes] == ["slurm-node0", "slurm-node1"]
    for node in plan.nodes:
        name = f"n{node.node_rank + 1}"
        grant(run, replace(node, name=name), name)

    assert [node.name for node in read_run_plan(run.path).nodes] == ["n1", "n2"]
