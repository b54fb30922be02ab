"""Checkpoints of nodes that share no disk: stopped and resumed over SSH, and taken up from each other's disks."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.fault_rig import FaultRig
from testkit.testbed_fixture import Testbeds

from cluster.plan_record import read_launch_plan
from engine.checkpoint.manifest import read_manifest
from engine.runs import RunFolder

pytestmark = pytest.mark.thorough

STEPS = 12
WORDS = (
    f"train.steps={STEPS}",
    "train.checkpoint.every_steps=3",
    "attention=burst",
    "train.compute_dtype=float32",
    "optimizer.schedule=constant",  # of the same rates, however many steps a run has
)


@pytest.fixture(scope="module")
def rig(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRig]:
    folder = tmp_path_factory.mktemp("checkpoints")
    testbeds = Testbeds(folder / "config")
    try:
        yield FaultRig(testbeds.make(nodes=2), folder / "config", folder)
    finally:
        testbeds.close()


@pytest.fixture(scope="module")
def whole(rig: FaultRig) -> dict[int, float]:
    """Losses by step of a run that nobody stopped."""
    done = rig.burst("launch", *rig.words(*WORDS))
    assert done.returncode == 0, done.stderr
    return losses(newest(rig))


def newest(rig: FaultRig) -> RunFolder:
    return RunFolder(max(rig.run_paths(), key=lambda path: path.name))


def losses(run: RunFolder) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.read_metrics()}


def restored_steps(run: RunFolder) -> list[int]:
    return [event["step"] for event in run.read_events() if event["kind"] == "restored"]


def checkpoints(rig: FaultRig, run: RunFolder, node: str) -> Path:
    """Where the node keeps those of the run."""
    return rig.node_folder(run, node) / "checkpoints"


def meeting_port(run: RunFolder) -> int:
    """Where the ranks of the newest attempt met."""
    ports = {word for node in read_launch_plan(run.path).nodes for word in node.argv if "master-port" in word}
    (port,) = ports
    return int(port.partition("=")[2])


@contextlib.contextmanager
def taken_port(rig: FaultRig, port: int) -> Iterator[None]:
    """Somebody else listens on the port of the first node."""
    program = (
        f"import socket, sys; s = socket.create_server(('', {port})); print('ready', flush=True); sys.stdin.read()"
    )
    command = rig.testbed.node(rig.testbed.node_names[0]).inside(sys.executable, "-c", program)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.kill()


def test_a_stopped_run_is_resumed_where_it_was(rig: FaultRig, whole: dict[int, float]) -> None:
    # Slow from the fourth step on, or the last might be done before the request to stop has come to all ranks.
    launched = rig.launch(*rig.words(*WORDS, 'cluster.environment=["BURST_FAULT=slow:1;1;4"]'))
    run = launched.wait_for_step(4)
    launched.process.send_signal(signal.SIGINT)
    assert launched.end() == 130, launched.said()
    rig.wait_until_gone(run.run_id)
    stopped = max(losses(run))
    assert 4 <= stopped < STEPS
    for node in rig.testbed.node_names:
        newest_one = max(checkpoints(rig, run, node).glob("step-????????"))
        assert newest_one.name == f"step-{stopped:08d}"
        manifest = read_manifest(newest_one)
        own = [name for name in manifest.files if (newest_one / name).exists()]
        assert len(own) == 1 < len(manifest.files)  # the parts of its own rank
    old = meeting_port(run)
    with taken_port(rig, old):
        resumed = rig.burst("resume", run.run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert meeting_port(run) != old
    assert restored_steps(run) == [stopped]
    again = losses(run)
    assert sorted(again) == list(range(stopped + 1, STEPS + 1))
    assert all(loss.hex() == whole[step].hex() for step, loss in again.items())


def test_nodes_whose_disks_changed_places_send_each_other_what_they_lack(
    rig: FaultRig, whole: dict[int, float], tmp_path: Path
) -> None:
    done = rig.burst("launch", *rig.words(*WORDS, "train.checkpoint.folder='~/saved'", "train.steps=6"))
    assert done.returncode == 0, done.stderr
    source = newest(rig).run_id
    first, second = (rig.testbed.node(name).folder.home / "saved" for name in rig.testbed.node_names)
    for old, new in ((first, tmp_path / "aside"), (second, first), (tmp_path / "aside", second)):
        shutil.move(old, new)
    assert (second / source / "step-00000006" / "rank00000.safetensors").exists()
    done = rig.burst("launch", *rig.words(*WORDS, f"train.checkpoint.resume_from='~/saved/{source}'"))
    assert done.returncode == 0, done.stderr
    run = newest(rig)
    assert restored_steps(run) == [6]
    found = losses(run)
    assert sorted(found) == list(range(7, STEPS + 1))
    assert all(loss.hex() == whole[step].hex() for step, loss in found.items())
