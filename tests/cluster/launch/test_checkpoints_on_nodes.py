"""Checkpoints of nodes that share no disk: stopped and resumed over SSH, and taken up from each other's disks."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from testkit.fault_rig import FaultRig, port_held
from testkit.testbed_fixture import Testbeds

from cluster.plan import read_launch_plan
from engine.runs.checkpoints import read_manifest
from engine.runs.folder import RunFolder

pytestmark = pytest.mark.thorough

STEPS = 12
WORDS = (
    f"train.steps={STEPS}",
    "cluster.shared_folder=null",  # every node has a disk of its own
    "train.checkpoint.every_steps=3",
    "attention=burst",
    "train.compute_dtype=float32",
    "optimizer.schedule=constant",  # of the same rates, however many steps a run has
)


@pytest.fixture(scope="module")
def rig(module_testbeds: Testbeds, tmp_path_factory: pytest.TempPathFactory) -> FaultRig:
    return FaultRig(module_testbeds.make(nodes=2), module_testbeds.config_dir, tmp_path_factory.mktemp("checkpoints"))


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
    for node in rig.testbed.node_names:  # the code is brought again
        for code in (rig.testbed.node(node).home / ".burst/code").glob("*"):
            code.unlink()
    old = meeting_port(run)
    with port_held(rig.testbed, rig.testbed.node_names[0], old):
        resumed = rig.burst("resume", run.run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert meeting_port(run) != old
    assert restored_steps(run) == [stopped]
    again = losses(run)
    assert sorted(again) == list(range(stopped + 1, STEPS + 1))
    assert all(loss.hex() == whole[step].hex() for step, loss in again.items())


def test_verbs_reach_the_weights_of_a_run_on_nodes(rig: FaultRig, whole: dict[int, float], tmp_path: Path) -> None:
    run = next(run for run in map(RunFolder, sorted(rig.run_paths())) if run.read_state()["state"] == "completed")
    for verb in ("list", "verify"):
        said = rig.burst("checkpoint", verb, run.run_id, "--json")
        assert said.returncode == 0, said.stderr
        found = json.loads(said.stdout)["checkpoints"]
        assert [(one["step"], one["ranks"], one["problem"], one["verified"]) for one in found] == [
            (step, 2, None, verb == "verify") for step in (12, 9)
        ]
    evaluated = rig.burst("eval", run.run_id, "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    expected = json.loads((run.path / "summary.json").read_text())["final_validation_loss"]
    assert json.loads(evaluated.stdout)["final_validation_loss"] == pytest.approx(expected, rel=1e-6)
    exported = rig.burst("checkpoint", "export", run.run_id, str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model/model.safetensors").exists()
    said = rig.burst("checkpoint", "fetch", run.run_id, "--step", "9", "--json")
    assert said.returncode == 0, said.stderr
    assert sorted(path.name for path in (run.path / "checkpoints").glob("step-*")) == ["step-00000009", "step-00000012"]
    here = rig.burst("eval", run.run_id, "cluster=local", "--json")
    assert here.returncode == 0, here.stderr
    assert json.loads(here.stdout)["final_validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_checkpoints_lie_where_all_nodes_see_them(rig: FaultRig) -> None:
    shared = rig.testbed.shared
    assert shared.is_dir()
    done = rig.burst("launch", *rig.words("train.steps=3", "train.checkpoint.every_steps=3"))
    assert done.returncode == 0, done.stderr
    run = newest(rig)
    (path,) = shared.glob(f".burst-*/checkpoints/{run.run_id}/step-00000003")
    assert len(list(path.glob("*.safetensors"))) == 2
    said = rig.burst("checkpoint", "verify", run.run_id)
    assert (said.returncode, "as it was written" in said.stdout) == (0, True)


def test_nodes_whose_disks_changed_places_send_each_other_what_they_lack(
    rig: FaultRig, whole: dict[int, float], tmp_path: Path
) -> None:
    done = rig.burst("launch", *rig.words(*WORDS, "train.checkpoint.folder='~/saved'", "train.steps=6"))
    assert done.returncode == 0, done.stderr
    source = newest(rig).run_id
    first, second = (rig.testbed.node(name).home / "saved" for name in rig.testbed.node_names)
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
