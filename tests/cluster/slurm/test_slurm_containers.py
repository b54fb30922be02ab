"""Containers of ranks under Slurm: no process of the job, so the supervisor has to end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from slurm_rig import SlurmBench, job_id
from testkit import KIT
from testkit.fake_run import Led
from testkit.image_rig import busybox_tree
from testkit.waiting import wait_for

from cluster.testbed.testbed import Node

IMAGE = "rig:1"


@pytest.fixture(scope="module")
def docker_testbed(module_testbeds):
    """Two nodes with Slurm and Docker, and an image without anything: what ranks need is mounted."""
    testbed = module_testbeds.make(nodes=2, slurm=True, docker=True, docker_in_memory=True)
    for node in testbed.nodes:
        docker(node, "import", "-", IMAGE, stdin=busybox_tree())
    return testbed


@pytest.fixture
def bench(docker_testbed, tmp_path, monkeypatch):
    bench = SlurmBench(docker_testbed, tmp_path)
    monkeypatch.setenv("SLURM_CONF", bench.environment["SLURM_CONF"])
    yield bench
    bench.wait_idle()


def docker(node: Node, *words: str, stdin: bytes = b"") -> str:
    command = ("docker", "-H", f"unix://{node.docker_socket}", *words)
    return subprocess.run(command, input=stdin, capture_output=True, check=True, timeout=60).stdout.decode().strip()


def containers(bench: SlurmBench) -> list[str]:
    return [docker(node, "ps", "--all", "--quiet") for node in bench.testbed.nodes]


def plan(bench: SlurmBench, mode: str):
    """The fake trainer in containers, with this machine's Python."""
    from engine.config.cluster import ContainerConfig

    prefixes = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", str(KIT)}
    mounts = tuple(sorted(path for path in prefixes if Path(path).exists()))
    container = ContainerConfig(runtime="docker", image=IMAGE, run_options=(), mounts=mounts)
    return bench.plan(mode, container=container, python=sys.executable)


def test_ranks_run_in_containers_that_are_gone_afterwards(bench):
    led = Led(plan(bench, "ok")).begin()
    outcome = led.wait()

    assert outcome.status == "completed", led.describe()
    assert "--init" in led.run.path.joinpath("launch.json").read_text()
    assert containers(bench) == ["", ""]


@pytest.mark.thorough
def test_containers_of_ranks_that_ignore_everything_end_with_the_job(bench):
    led = Led(plan(bench, "ignore")).begin()
    led.wait_for_step(5)
    assert all(containers(bench))
    bench.client("scancel", job_id(led.run))
    outcome = led.wait()

    assert outcome.status == "cancelled"
    wait_for(lambda: containers(bench) == ["", ""])


@pytest.mark.thorough
def test_the_container_of_a_supervisor_that_was_killed_is_swept(bench):
    led = Led(plan(bench, "wait")).begin()
    led.wait_for_step(5)
    # Who leads looks at the nodes now and then: the ranks may be there before it has heard of their supervisors.
    wait_for(lambda: [status.supervisor.get("pid") is not None for status in led.observer.statuses] == [True] * 2)
    supervisor = led.observer.statuses[1].supervisor
    assert psutil.pid_exists(supervisor["pid"])
    os.kill(supervisor["pid"], signal.SIGKILL)
    outcome = led.wait()

    assert outcome.status == "failed"
    wait_for(lambda: containers(bench) == ["", ""])
