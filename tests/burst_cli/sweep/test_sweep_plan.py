from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.command_line import Burst

from burst_cli.compose import sweep_axes
from burst_cli.overrides import Axis
from burst_cli.plan.memory_check import Estimate, MemoryPlanner
from burst_cli.sweep.plan import LaunchJudge, SweepPlan, build_sweep, cells_of, check_axes, check_legal, total
from burst_cli.sweep.sweeping import choose_lanes
from cluster.launch.local import probe_local_node
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, ParallelConfig, RunConfig, TrainConfig
from engine.planning.methods.presets import AttentionMethod
from engine.planning.topology import Topology
from engine.predict.memory import Hardware, MemoryPrediction


class Judge:
    """Refuses odd lengths, finds lengths above 4000 too long for the memory."""

    def settle(self, config: RunConfig) -> RunConfig:
        if config.train.seq_len % 2:
            raise ConfigError([f"train.seq_len={config.train.seq_len} is odd"])
        return config

    def expect(self, config: RunConfig, *, is_known: bool = False) -> tuple[str | None, Estimate]:
        too_long = config.train.seq_len > 4000 and not is_known
        return "does not fit" if too_long else None, Estimate(float(config.train.seq_len), 4, "a guess")


def compose(words: Sequence[str]) -> RunConfig:
    values = dict(word.split("=") for word in words)
    if values.get("attention") == "nonsense":
        raise ConfigError(["attention has no option nonsense"])
    return RunConfig(train=TrainConfig(seq_len=int(values["train.seq_len"])), exp=values.get("attention", "one"))


def plan_of(*lengths: str, attention: Sequence[str] = ("one",), **how: Any) -> SweepPlan:
    axes = {"train.seq_len": lengths, "attention": attention}.items()
    spelt = [Axis(key, tuple(f"{key}={one}" for one in options), tuple(options), True) for key, options in axes]
    return build_sweep(["a=b"], spelt, compose, Judge(), **how)  # type: ignore[arg-type]


def test_cells_are_nested_loops_over_the_lists_as_typed() -> None:
    cells = cells_of(sweep_axes(["exp=tiny", "train.seq_len=512,1024", "attention=burst,ring"]))
    words = list(itertools.product(["exp=tiny"], ["512", "1024"], ["burst", "ring"]))
    assert [overrides for overrides, _ in cells] == [
        (exp, f"train.seq_len={length}", f"attention={preset}") for exp, length, preset in words
    ]
    assert cells[2][1] == {"train.seq_len": "1024", "attention": "burst"}


def test_every_list_of_the_grammar_is_an_axis() -> None:
    for word, values in [
        ("train.seq_len=range(512,1537,512)", ("512", "1024", "1536")),
        ("attention=choice(ring,burst)", ("ring", "burst")),
        ("train.steps=sort(5,3,4)", ("3", "4", "5")),
        ("memory=glob(seq*)", ("seq_fraction",)),
        ("train.profile='1:2','3:4'", ("1:2", "3:4")),
        ("data.paths=[a,b],[c]", ("[a,b]", "[c]")),
    ]:
        (axis,) = sweep_axes([word])
        assert (axis.values, axis.is_sweep) == (values, True)


def test_words_that_are_no_sweep_are_refused_with_what_to_do() -> None:
    for words, text in [
        (["train.seqlen=1,2"], "did you mean train.seq_len?"),
        (["train.seq_len=interval(1,2)"], "interval() has no steps"),
        (["train.seq_len=range(1,2,0)"], "range() arg 3 must not be zero"),
        (["train.seq_len=range(1,nan)"], "not in the grammar of overrides"),
        (["x"], "expected KEY=VALUE"),
        (["=1,2"], "expected KEY=VALUE"),
        (["exp=tiny"], "this is one run: use `burst launch`"),
        (["attention=glob(x*)"], "no value is left"),
        (["train.steps=1,2", "train.steps=3,4"], "train.steps is given 2 times"),
        (["train.steps=range(1,100000)"], "at most 2000"),
    ]:
        with pytest.raises(ConfigError) as refused:
            check_axes(sweep_axes(words))
        assert text in " ".join(refused.value.problems)
    check_axes(sweep_axes(["train.steps=range(1,2001)"]))


def test_a_name_that_no_folder_can_have_is_refused(burst: Burst) -> None:
    for name in ["a/b", "..", "", "two words"]:
        result = burst("sweep", "exp=tiny", "train.steps=1,2", "--dry-run", "--name", name)
        assert (result.code, "it names a folder" in result.err) == (2, True)
    words = ("--parallel", "2", "--max-failures", "1", "--name", "lab", "--dry-run")
    illegal = burst("sweep", "exp=tiny", "attention=brust,wring", *words)
    assert (illegal.code, "2 of 2 cells cannot run" in illegal.err) == (2, True)


def test_every_cell_is_judged_before_any_runs() -> None:
    legal, odd, long = plan_of("512", "0512", "513", "8192").cells
    assert (legal.problems, legal.short_of_memory, legal.estimate) == ((), None, Estimate(512.0, 4, "a guess"))
    assert (odd.problems, long.short_of_memory) == (("train.seq_len=513 is odd",), "does not fit")


def test_recorded_memory_shortages_are_reused() -> None:
    legal, _, long = plan_of("512", "0512", "513", "8192").cells
    again = plan_of("512", "8192", recorded=lambda sweep_id: {legal.cell_id: "no room", long.cell_id: None})
    assert [cell.short_of_memory for cell in again.cells] == ["no room", None]  # as an earlier command found


def test_illegal_cells_are_refused_with_every_reason_once() -> None:
    plan = plan_of("512", "513", "514", "516", attention=("a", "nonsense", "b", "c"))
    with pytest.raises(ConfigError) as refused:
        check_legal(plan, skip_illegal=False)
    *texts, last = refused.value.problems
    cells = ", ".join(f"train.seq_len={length} attention=nonsense" for length in (512, 513, 514))
    assert texts == [
        f"attention has no option nonsense  [{cells} and 1 more]",
        f"train.seq_len=513 is odd  [{', '.join(f'train.seq_len=513 attention={one}' for one in 'abc')}]",
    ]
    assert "7 of 16 cells cannot run" in last


def test_illegal_cells_are_skipped_beside_legal_ones_only() -> None:
    plan = plan_of("512", "513", "514", "516", attention=("a", "nonsense", "b", "c"))
    check_legal(plan, skip_illegal=True)
    with pytest.raises(ConfigError):
        check_legal(plan_of("511", "513"), skip_illegal=True)


@given(st.permutations(["512", "1024", "2048"]))
def test_ids_do_not_depend_on_the_order_of_values(values: list[str]) -> None:
    plan, other = plan_of(*values), plan_of(*sorted(values))
    assert plan.sweep_id == other.sweep_id
    assert (len(plan.sweep_id), {len(cell.cell_id) for cell in plan.cells}) == (8, {10})
    assert {cell.cell_id for cell in plan.cells} == {cell.cell_id for cell in other.cells}
    assert plan_of(*values, name="lab").sweep_id == f"lab-{plan.sweep_id}" != plan_of("2", "6", name="lab").sweep_id


# --- what a cell is expected to take ----------------------------------------------------------------------------------

CONFIG = RunConfig(
    attention=AttentionConfig(preset="burst"),
    train=TrainConfig(seq_len=4096, steps=10),
    cluster=ClusterConfig(ranks_per_node=2, threads_per_rank=4, backend="gloo"),
)


def test_a_cell_of_known_ranks_has_a_predicted_duration() -> None:
    run = MemoryPlanner().resolve(CONFIG)
    step = MemoryPlanner().predict_time(run)
    assert step is not None
    judge = LaunchJudge(probe_local_node(), MemoryPlanner())
    assert judge.expect(CONFIG, is_known=True)[1] == Estimate(
        10 * step.seconds, 2, "the prediction for cpu, without the start", step.seconds
    )
    unsettled = AttentionConfig(preset="auto", mask="blocks", blocks_file="none.npz")
    unknown = replace(CONFIG, cluster=ClusterConfig()), replace(CONFIG, attention=unsettled)
    assert [judge.expect(config, is_known=True) for config in unknown] == [(None, None)] * 2


def needs_a_gib(config: RunConfig, method: AttentionMethod, world: Topology) -> MemoryPrediction:
    components = {"device": {"loss": 2**30}, "host": {}}
    return MemoryPrediction("cpu", 2, 0, 2**30, 0, "loss", components, {}, reserve_bytes=0, seconds=0.0)


def test_a_cell_is_judged_as_its_launch_would() -> None:
    judge = LaunchJudge(probe_local_node(), MemoryPlanner(Hardware((), 2**29, "MemTotal"), needs_a_gib))
    shortage = judge.expect(CONFIG)[0] or ""
    assert shortage.startswith("does not fit: a rank needs 1 GiB, 768 MiB more than the 256 MiB")
    elsewhere = replace(CONFIG, cluster=replace(CONFIG.cluster, launcher="ssh", nodes="n1"))
    unknown, forced = replace(CONFIG, cluster=ClusterConfig()), replace(judge, force=True)
    assert [judge.expect(elsewhere)[0], forced.expect(CONFIG)[0]] == [None, None]
    assert judge.settle(unknown).cluster.world_size is not None
    with pytest.raises(ConfigError, match="x cp_size 3 = 3, but there are 2 ranks"):
        judge.settle(replace(CONFIG, parallel=ParallelConfig(cp_size=3)))


def test_total_packs_cells_into_lanes_and_needs_every_estimate() -> None:
    seconds = [Estimate(float(s), 4, "") for s in (30, 10, 10, 10)]
    assert total(seconds, 1) == (60.0, 60 * 4 / 3600)
    assert total(seconds, 2) == (30.0, 60 * 4 / 3600)
    assert total([*seconds, None], 1) is None


# --- lanes ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 8))
def test_lanes_are_disjoint_equal_and_cover_all_nodes(size: int, parallel: int) -> None:
    names = [f"n{k}" for k in range(size * parallel)]
    lanes = choose_lanes(names, parallel, gpus=8)
    assert all(lane.overrides == (f"cluster.nodes='{lane.name}'",) for lane in lanes)
    parts = [lane.name.split(",") for lane in lanes]
    assert [name for part in parts for name in part] == names
    assert {len(part) for part in parts} == {size}


def test_nodes_that_cannot_be_divided_and_gpus_that_would_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match="legal values: 1, 2, 3, 6"):
        choose_lanes([f"n{k}" for k in range(6)], 4)
    with pytest.raises(ConfigError, match="would share the 8 GPUs"):
        choose_lanes([], 2, gpus=8)
    found = [choose_lanes([], 2), choose_lanes([], 2, gpus=8, is_queued=True), choose_lanes([], 1, gpus=8)]
    names = [tuple(lane.name for lane in lanes) for lanes in found]
    assert names == [("this machine 1", "this machine 2"), ("the queue 1", "the queue 2"), ("this machine",)]
