"""What a rank needs of memory: what is refused, what is only warned of, what is shown and kept of the reckoning."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from testkit.fake_plan import node_facts
from testkit.resolved import step_of
from testkit.sections import changed
from testkit.terminal import lines_of

from burst_cli.compose import compose
from burst_cli.launch.resolve import with_run
from burst_cli.launch.show import launch_notes
from burst_cli.plan.candidates import Plan
from burst_cli.plan.memory_check import MEMORY_PLAN_FILE, MemoryCheck, MemoryPlanner, check_memory
from burst_cli.plan.table import answer_view, details_view
from cluster.launch.local import build_local_plan
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError, RunError
from engine.config.settings import AttentionConfig, MemoryConfig, RunConfig, TrainConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.machine import find_machine
from engine.predict.memory import Capacity, Gpu, Hardware, MemoryPrediction, shared_predictor
from engine.resolve.run import resolve_run
from engine.runs.folder import RESOLVED_FILE

GIB = 2**30
GPUS = ClusterConfig(ranks_per_node=4, backend="nccl")
CONFIG = RunConfig(attention=AttentionConfig(preset="burst"), cluster=GPUS, train=TrainConfig(seq_len=1024))
OPEN = dataclasses.replace(CONFIG, memory=MemoryConfig(activation_checkpoint="auto"))
ON_CPU = dataclasses.replace(CONFIG, cluster=ClusterConfig(ranks_per_node=4, backend="gloo"))
LARGE = {"optimizer": 5 * GIB, "checkpoints": 40 * GIB, "attention": 20 * GIB, "loss": GIB, "other": 0}
H100 = Hardware((Gpu("NVIDIA H100", 80 * GIB),), 100 * GIB, "MemTotal")
CPU = Hardware((), 32 * GIB, "MemTotal")


def need(device_gib: float, host_gib: float = 0.0) -> MemoryPrediction:
    components = {"device": LARGE, "host": {"checkpoints": int(host_gib * GIB)}}
    sizes = (int(device_gib * GIB), int(host_gib * GIB))
    return MemoryPrediction("cuda", 4, 0, *sizes, "loss", components, {}, reserve_bytes=0, seconds=0.0)


def check(
    answer: MemoryPrediction | RunError, config: RunConfig = CONFIG, hardware: Hardware = H100, *, force: bool = True
) -> MemoryCheck:
    def predict(config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
        if isinstance(answer, RunError):
            raise answer
        return answer

    planner = MemoryPlanner(hardware, predict)
    return check_memory(planner.resolve(config), planner, force=force)


@pytest.mark.parametrize("policy", ["full", "auto"])
def test_run_that_fits_is_predicted_once(policy: str) -> None:
    asked: list[RunConfig] = []

    def predict(config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
        asked.append(config)
        return need(79, 24)

    config = changed(CONFIG, memory={"activation_checkpoint": policy})
    planner = MemoryPlanner(H100, predict)
    check = check_memory(planner.resolve(config), planner)
    assert (len(asked), check.problems) == (1, [])
    assert check.needs == "79 GiB of 80 GiB on NVIDIA H100, 96 GiB of 100 GiB of host memory per node"
    document = check.to_dict()
    assert document.pop("step_time")["machine"] == "h100"
    assert bool(document.pop("candidates")) is (document.pop("reason") != "as configured") is (policy == "auto")
    assert document == {
        **{"world_size": 4, "rank": 0, "local_ranks": 4, "phase": "loss", "phase_peaks": {}, "seconds": 0.0},
        **{"device_peak_bytes": 79 * GIB, "needed_bytes": 79 * GIB, "reserve_bytes": 0, "host_peak_bytes": 24 * GIB},
        "components": {"device": LARGE, "host": {"checkpoints": 24 * GIB}},
        **{"device": "NVIDIA H100", "device_source": "nvidia-smi", "device_capacity_bytes": 80 * GIB},
        **{"host_source": "MemTotal", "host_capacity_bytes": 100 * GIB, "host_is_device": False},
        **{"fits": True, "headroom_bytes": GIB, "policy": "full" if policy == "full" else "none, on device"},
        **{"problems": [], "advice": [], "warnings": []},
    }


def test_refusal_names_missing_bytes_with_remedies() -> None:
    with pytest.raises(ConfigError) as caught:
        check(need(95), force=False)
    problem = (
        "does not fit: a rank needs 95 GiB, 15 GiB more than the 80 GiB of NVIDIA H100 (nvidia-smi), by the prediction"
        "; most of it in phase loss. Largest: checkpoints 40 GiB, attention 20 GiB, optimizer 5 GiB. Use less memory "
        "per rank, with the first of these that you can afford: memory.tile_tokens=256; memory.activation_store=host; "
        "memory.optimizer_store=host; more ranks (cluster.ranks_per_node), which share one sequence; a smaller "
        "train.seq_len."
    )
    assert str(caught.value) == f"{problem} To start it all the same, add --force."
    forced = check(need(95))
    assert (forced.to_dict()["fits"], launch_notes(forced).plain) == (False, f"warning: {problem}\n")
    assert forced.needs == "95 GiB of 80 GiB on NVIDIA H100"  # and nothing of the host


def test_refusal_names_the_policy_that_would_fit() -> None:
    def predict(config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
        return need(10 if config.memory.tile_tokens else 95)

    long = dataclasses.replace(CONFIG, train=TrainConfig(seq_len=2**20))
    planner = MemoryPlanner(H100, predict)
    with pytest.raises(ConfigError, match=r"What helps: memory=auto would fit with .* memory\.tile_tokens="):
        check_memory(planner.resolve(long), planner)


@pytest.mark.parametrize(("device_gib", "needs", "fits"), [(5, "8 GiB of 8 GiB on cpu", True), (6, "9 GiB of", False)])
def test_on_the_cpu_both_memories_are_one(device_gib: float, needs: str, fits: bool) -> None:
    """6 GiB of tensors and 3 GiB of stores do not fit into 8 GiB, and are not told as 6 of 8."""
    found = check(need(device_gib, 3), ON_CPU, CPU)
    assert (found.needs.startswith(needs), found.fits) == (True, fits)
    wanted = [] if fits else ["a rank needs 9 GiB, 1 GiB more than the 8 GiB of cpu"]
    assert [text for text in wanted if text not in found.problems[0]] == []
    assert not any("of host memory (MemTotal)" in problem for problem in found.problems)


def test_host_memory_can_be_what_is_missing() -> None:
    found = check(need(50, 200))
    assert found.needs.endswith(", 800 GiB of 100 GiB of host memory per node")
    assert found.problems[0].startswith(
        "does not fit: 4 ranks need 800 GiB, 700 GiB more than the 100 GiB of host memory (MemTotal), by the prediction"
        ". Largest, per rank: checkpoints 200 GiB. What helps: 800 GiB or more of host memory per node would be enough"
    )


def test_open_policy_counts_as_one_that_computes_nothing_again() -> None:
    planner = MemoryPlanner(H100)
    step, open_step = (planner.predict_time(planner.resolve(one, search=False)) for one in (CONFIG, OPEN))
    assert step is not None
    assert open_step is not None
    assert open_step.seconds < step.seconds


def test_time_of_an_unknown_device_is_not_predicted() -> None:
    planner = MemoryPlanner(Hardware((Gpu("Strange 1", 80 * GIB),), None, ""))
    assert planner.predict_time(planner.resolve(CONFIG)) is None


def test_what_is_not_known_is_started_with_a_warning() -> None:
    found = check(need(5000, 5000), ON_CPU, Hardware((), None, "unknown"), force=False)
    assert (found.problems, found.to_dict()["fits"], found.needs) == ([], None, "4.88 TiB")
    host = check(need(1, 2), hardware=dataclasses.replace(H100, host_bytes=None)).needs
    assert host.endswith(", 8 GiB of an unknown amount of host memory per node")
    assert "not checked whether this run fits: the memory of this machine is unknown" in launch_notes(found).plain
    found = check(RunError("no torch here."), force=False)
    assert (found.needs, found.to_dict()["fits"], found.to_dict()["needed_bytes"]) == ("not predicted", None, None)
    assert "not checked whether this run fits: no torch here." in launch_notes(found).plain
    with pytest.raises(RunError, match="no torch here"):  # but a policy cannot be chosen
        check(RunError("no torch here."), OPEN)


def test_resolved_memory_policy_is_in_the_launch_plan(tmp_path: Path) -> None:
    found = check(need(1), OPEN, force=False)
    assert found.config.memory.activation_checkpoint == "none"  # there is room for everything
    assert launch_notes(found).plain.startswith("memory.activation_checkpoint=auto: none, on ")
    on_gpus = dataclasses.replace(node_facts(), gpus=4)
    files = dict(with_run(build_local_plan(OPEN, on_gpus, tmp_path / "run"), found).files)
    assert "activation_checkpoint: auto" in files["config.yaml"], "what was asked for is lost"
    assert json.loads(files[RESOLVED_FILE])["run"]["config"]["memory"]["activation_checkpoint"] == "none"
    assert json.loads(files[MEMORY_PLAN_FILE]) == found.to_dict()
    assert "full, on host" in [candidate["name"] for candidate in found.to_dict()["candidates"]]


def test_auto_is_resolved_although_no_policy_fits_if_forced() -> None:
    with pytest.raises(ConfigError, match="15 GiB more than"):
        check(need(95), OPEN, force=False)
    assert check(need(95), OPEN).config.memory.activation_checkpoint != "auto"


def test_memory_in_a_plan_is_shown_by_component_with_the_policies_it_was_chosen_from() -> None:
    found = check(dataclasses.replace(need(95, 200), reserve_bytes=GIB), OPEN)
    plan = Plan(found.run, step_of(found.config, Topology(1, 4), find_machine("h100")), found)
    lines = [re.sub(r"[\d.]+ ms", "#", line.strip("│┃ ")) for line in lines_of(answer_view(plan), details_view(plan))]
    reserved = "(1 GiB of it reserved for CUDA, NCCL and fragmentation)"
    missing = f"800 GiB of 100 GiB of host memory per node {reserved}, 175 GiB per rank are missing in the device"
    assert lines[1].startswith(f"memory DOES NOT FIT: 96 GiB of 80 GiB on NVIDIA H100, {missing};")
    at = lines.index("memory of a rank ┃ device ┃ host")
    (end,) = (number for number, line in enumerate(lines) if line.startswith("no policy fits"))
    assert [line for line in lines[at : end - 10] if line[:1] not in "┏┡├└"] == [
        "memory of a rank ┃ device ┃ host",
        *("optimizer │ 5 GiB", "checkpoints │ 40 GiB │ 200 GiB", "attention │ 20 GiB", "loss │ 1 GiB"),
        *("peak │ 95 GiB │ 200 GiB", "in phase │ loss", "context, communicators, fragmentation │ 1 GiB"),
        "memory=auto, best first fits device host kept moved FLOPs again step",
        "none, on device no, 175 GiB short 96 GiB 200 GiB 8.05 MiB #",
        "seq_fraction 0.75, on device not tried 908 KiB 5.17G",
    ]
    assert lines[end - 6] == "none, on host not tried 8.05 MiB 16.1 MiB"
    assert " ".join(lines[end : end + 2]).endswith("too much for the memory there is. 26 more in --json.")


def test_policies_are_named_by_their_settings() -> None:
    for memory, words in [
        ({"activation_checkpoint": "full"}, "full"),
        ({"activation_checkpoint": "seq_fraction", "saved_fraction": 0.25}, "seq_fraction 0.25"),
        ({"activation_checkpoint": "attn_out_every", "activation_store": "host"}, "attn_out_every 4, on host"),
        ({"checkpoint_layers": ("full", "none")}, "full/none"),
        ({"tile_tokens": 512, "optimizer_store": "host"}, "full, tiles of 512, optimizer on host"),
    ]:
        assert check(need(1), changed(CONFIG, memory=memory)).policy == words


@pytest.mark.thorough
def test_llama8b_512k_fits_on_one_gpu_with_its_host() -> None:
    room = Capacity("h200", 136 * 10**9, "test", 120 * 10**9, "test", 1)
    settings = compose(["exp=llama8b_512k"]).config
    choice = resolve_run(settings, Topology(1, 1), find_machine("h200"), room, shared_predictor().predict)
    memory = choice.config.memory
    assert (choice.memory_fits, memory.activation_checkpoint, memory.activation_store) == (True, "full", "host")
    assert 1 < (memory.host_layers or 32) < 32
