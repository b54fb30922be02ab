"""What is refused for lack of memory, what is only warned of, and what is kept of the reckoning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from testkit.fake_plan import node_facts

from burst_cli.memory_check import MEMORY_PLAN_FILE, MemoryCheck, Place, check_memory, with_memory
from burst_cli.plan_view import launch_notes
from cluster.plan import build_launch_plan
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError, RunError
from engine.config.settings import AttentionConfig, MemoryConfig, RunConfig, TrainConfig
from engine.memory.auto import MemoryChoice, settle_memory
from engine.memory.capacity import Capacity
from engine.memory.estimate import MemoryEstimate
from engine.memory.fit import Prediction
from engine.planning.methods.topology import Topology

GIB = 2**30
CONFIG = RunConfig(
    attention=AttentionConfig(preset="burst"),
    cluster=ClusterConfig(ranks_per_node=4, backend="gloo"),
    train=TrainConfig(seq_len=1024),
)
LARGE = {"optimizer": 5 * GIB, "checkpoints": 40 * GIB, "attention": 20 * GIB, "loss": GIB, "other": 0}
H100 = Capacity("NVIDIA H100", 80 * GIB, "the driver", 100 * GIB, "MemTotal", 4)
CPU = Capacity("cpu", 8 * GIB, "MemTotal / 4 ranks", 32 * GIB, "MemTotal", 4, host_is_device=True)


def need(device_gib: float, host_gib: float = 0.0) -> MemoryEstimate:
    host = {"checkpoints": int(host_gib * GIB)}
    return MemoryEstimate(int(device_gib * GIB), int(host_gib * GIB), "loss", {"device": LARGE, "host": host})


@dataclasses.dataclass
class FakePlanner:
    """A planner that says what it was made with, and counts how often it was asked for the exact prediction."""

    closed: Prediction
    exact: Prediction | RunError = dataclasses.field(default_factory=lambda: RunError("not to be asked."))
    has: Capacity | ConfigError = H100
    predictions: int = 0

    def settle(self, config: RunConfig, capacity: Capacity, *, exactly: bool) -> MemoryChoice:
        ranks = Topology(1, 4)
        return settle_memory(config, ranks, capacity, verify=(lambda one, _: self.predict(one)) if exactly else None)

    def capacity(self, config: RunConfig) -> Capacity:
        if isinstance(self.has, ConfigError):
            raise self.has
        return self.has

    def estimate(self, config: RunConfig) -> Prediction:
        return self.closed

    def predict(self, config: RunConfig) -> Prediction:
        self.predictions += 1
        if isinstance(self.exact, RunError):
            raise self.exact
        return self.exact

    def advice(self, config: RunConfig, capacity: Capacity, place: Place) -> str:
        return f"Change something on the {place}."


def refused(planner: FakePlanner) -> str:
    with pytest.raises(ConfigError) as caught:
        check_memory(CONFIG, planner)
    return str(caught.value)


def test_run_that_needs_less_than_half_is_not_predicted() -> None:
    planner = FakePlanner(need(39, 12))
    check = check_memory(CONFIG, planner)
    assert (planner.predictions, check.problems, check.source) == (0, (), "the closed form")


def test_run_of_which_not_even_half_fits_is_not_predicted() -> None:
    planner = FakePlanner(need(161))
    assert "by the closed form" in refused(planner)
    assert planner.predictions == 0


@pytest.mark.parametrize("closed", [need(41), need(1, 13), need(159)])
def test_run_that_may_not_fit_is_predicted_and_the_prediction_decides(closed: Prediction) -> None:
    planner = FakePlanner(closed, need(79, 24))
    check = check_memory(CONFIG, planner)
    assert (planner.predictions, check.problems, check.source) == (1, (), "the prediction")


def test_refusal_says_by_how_much_where_why_and_what_to_do() -> None:
    text = refused(FakePlanner(need(70), need(95)))
    assert "a rank needs 95 GiB, 15 GiB more than the 80 GiB of NVIDIA H100 (the driver)" in text
    assert "by the prediction; most of it in phase loss" in text
    assert "Largest: checkpoints 40 GiB, attention 20 GiB, optimizer 5 GiB." in text
    assert "Change something on the device." in text
    assert "--force" in text


def test_host_memory_is_that_of_all_ranks_of_the_node() -> None:
    text = refused(FakePlanner(need(1, 30), need(1, 30)))
    assert "4 ranks need 120 GiB, 20 GiB more than the 100 GiB of host memory (MemTotal)" in text
    assert "Change something on the host." in text


def test_forced_run_is_started_with_a_warning_and_says_so_in_its_plan() -> None:
    check = check_memory(CONFIG, FakePlanner(need(70), need(95)), force=True)
    assert check.to_dict()["fits"] is False
    assert launch_notes(check).plain.startswith("warning: does not fit: ")


def test_force_changes_nothing_for_a_run_that_fits() -> None:
    assert check_memory(CONFIG, FakePlanner(need(1)), force=True) == check_memory(CONFIG, FakePlanner(need(1)))


def test_on_the_cpu_both_memories_are_one() -> None:
    text = refused(FakePlanner(need(6, 3), need(6, 3), has=CPU))
    assert "a rank needs 9 GiB, 1 GiB more than the 8 GiB of cpu" in text
    assert "Change something on the host." not in text


def test_nothing_is_refused_when_the_capacity_is_unknown() -> None:
    planner = FakePlanner(need(5000, 5000), has=ConfigError("no such device"))
    check = check_memory(CONFIG, planner)
    assert (check.problems, check.to_dict()["fits"], planner.predictions) == ((), None, 0)
    assert "not checked whether this run fits: no such device" in launch_notes(check).plain


def test_prediction_that_cannot_be_made_leaves_the_closed_form_and_a_warning() -> None:
    check = check_memory(CONFIG, FakePlanner(need(79), RunError("no torch here.")))
    assert check.source == "the closed form"
    assert "no torch here. Whether" in launch_notes(check).plain
    assert "95 GiB" in refused(FakePlanner(need(95), RunError("no torch here.")))


OPEN = dataclasses.replace(CONFIG, memory=MemoryConfig(activation_checkpoint="auto"))


def settled_check() -> MemoryCheck:
    return check_memory(OPEN, FakePlanner(need(1)))


def test_auto_is_settled_and_its_reason_shown() -> None:
    check = settled_check()
    assert check.config.memory.activation_checkpoint == "none"  # there is room for everything
    assert launch_notes(check).plain.startswith("memory.activation_checkpoint=auto: none, on ")


def test_policy_that_is_chosen_is_predicted_when_room_is_short() -> None:
    planner = FakePlanner(need(70), need(75))
    check = check_memory(OPEN, planner)
    assert (planner.predictions, check.source, check.need) == (1, "the prediction", planner.exact)


def test_choice_of_which_nothing_fits_is_refused_or_forced() -> None:
    planner = FakePlanner(need(70), need(95))
    with pytest.raises(ConfigError, match="15 GiB more than"):
        check_memory(OPEN, planner)
    assert check_memory(OPEN, planner, force=True).config.memory.activation_checkpoint != "auto"


def test_choice_that_cannot_be_predicted_is_that_of_the_closed_form() -> None:
    check = check_memory(OPEN, FakePlanner(need(70), RunError("no torch here.")))
    assert (check.source, len(check.warnings)) == ("the closed form", 1)


def test_plan_keeps_the_settled_configuration_and_the_reckoning(tmp_path: Path) -> None:
    check = settled_check()
    plan = with_memory(build_launch_plan(check.config, node_facts(), tmp_path / "run"), check)
    files = dict(plan.files)
    assert "activation_checkpoint: none" in files["config.yaml"]
    document = json.loads(files[MEMORY_PLAN_FILE])
    assert document["policy"] == "none"
    assert "full, on host" in [candidate["name"] for candidate in document["candidates"]]
    assert (document["device_peak_bytes"], document["capacity"]["device_capacity_bytes"]) == (GIB, 80 * GIB)
    assert document["fits"] is True
