"""The same configuration gives the same losses here, over SSH, in containers and in a job: 2 nodes x 2 ranks, 4 x 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from testkit.fault_rig import FaultRig
from testkit.image_rig import LauncherEngine, launcher_engine
from testkit.testbed_fixture import Testbeds

from cluster.testbed.testbed import Testbed
from engine.runs.folder import RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

STEPS = 8
WORDS = (f"train.steps={STEPS}", "attention=burst", "train.compute_dtype=float32")
# The shape of a run: ranks per node and nodes; locally all ranks are on one machine that plans as many nodes.
SHAPES = {"2x2": (2, 2), "4x1": (4, 1)}


@pytest.fixture(scope="module")
def rig(module_testbeds: Testbeds, tmp_path_factory: pytest.TempPathFactory) -> FaultRig:
    testbed = module_testbeds.make(nodes=4, docker=True, docker_in_memory=True)
    return FaultRig(testbed, module_testbeds.config_dir, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def engine(rig: FaultRig) -> Iterator[LauncherEngine]:
    with launcher_engine() as made:
        yield made


@pytest.fixture(scope="module")
def local_losses(rig: FaultRig) -> dict[str, list[float]]:
    """Losses of the same run on this machine."""
    found = {}
    for shape, (nodes, ranks) in SHAPES.items():
        local = (f"cluster.ranks_per_node={nodes * ranks}", f"cluster.topology_nodes={nodes}", "cluster.backend=gloo")
        found[shape] = losses(rig, [*without_nodes(rig), *local])
    return found


def without_nodes(rig: FaultRig) -> list[str]:
    return [word for word in rig.words(*WORDS) if word != f"cluster={rig.testbed.name}"]


def losses(rig: FaultRig, words: Sequence[str], **env: str) -> list[float]:
    """The losses of a launch that ended well."""
    before = rig.run_paths()
    done = rig.burst("launch", *words, "--plain", timeout_s=300, env=env)
    assert done.returncode == 0, done.stderr
    (path,) = rig.run_paths() - before
    run = RunFolder(path)
    assert not rig.tells_secrets(run)
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def on_nodes(rig: FaultRig, shape: str) -> list[str]:
    nodes, ranks = SHAPES[shape]
    names = ",".join(rig.testbed.node_names[:nodes])
    return rig.words(*WORDS, f"cluster.nodes='{names}'", f"cluster.ranks_per_node={ranks}")


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_over_ssh_are_those_of_this_machine(
    rig: FaultRig, local_losses: dict[str, list[float]], shape: str
) -> None:
    assert losses(rig, on_nodes(rig, shape)) == pytest.approx(local_losses[shape], rel=1e-5)


def test_losses_in_containers_are_those_of_this_machine(
    rig: FaultRig, engine: LauncherEngine, local_losses: dict[str, list[float]]
) -> None:
    nodes = rig.testbed.node_names[:2]
    words = [*on_nodes(rig, "2x2"), *rig.push_host_image(engine, nodes)]
    assert losses(rig, words) == pytest.approx(local_losses["2x2"], rel=1e-5)
    assert [rig.containers(name) for name in nodes] == [[], []]


def test_losses_in_a_job_of_slurm_are_those_of_this_machine(
    rig: FaultRig, slurm_testbed: Testbed, local_losses: dict[str, list[float]]
) -> None:
    job = ("launcher=slurm", "num_nodes=2", "ranks_per_node=2", "slurm.gpus_per_node=0")
    words = [*without_nodes(rig), *(f"cluster.{word}" for word in job)]
    found = losses(rig, words, SLURM_CONF=str(slurm_testbed.slurm_conf))
    assert found == pytest.approx(local_losses["2x2"], rel=1e-5)
