"""`burst eval`: the run's own configuration and checkpoint, changed by what is typed, as a launch of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.saved_checkpoints import save_checkpoint

from burst_cli.checkpoint.weights import weights_of
from burst_cli.eval.request import evaluation_base
from engine.config.cluster import ClusterConfig
from engine.config.settings import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    dump_config,
)
from engine.runs.folder import RunFolder, create_run

CONFIG = RunConfig(
    exp="mine",
    seed=11,
    model=ModelConfig(num_layers=2, hidden_size=64, vocab_size=256, init_from="/gone/by/now"),
    attention=AttentionConfig(preset="burst", mask="window", window_tokens=96),
    train=TrainConfig(
        seq_len=512,
        eval_position_buckets=3,
        checkpoint=CheckpointConfig(every_steps=10),
        guard=GuardConfig(on_nonfinite="rewind"),
    ),
    data=DataConfig(tokenizer="bytes"),
    cluster=ClusterConfig(ranks_per_node=2, backend="gloo"),
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = create_run(tmp_path / "runs/mine/20260101-000000-abcdef", {"config.yaml": dump_config(CONFIG)})
    for step in (10, 20):
        save_checkpoint(made.path / "checkpoints", step)
    return made


def planned(burst: Any, *words: str) -> dict[str, Any]:
    """The configuration that a rehearsal shows."""
    result = burst("eval", *words, "--dry-run", "--json")
    assert result.code == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    return document


def test_a_run_is_evaluated_as_it_was_trained(burst: Any, run: RunFolder) -> None:
    document = planned(burst, "mine")
    config, train = document["config"], document["config"]["train"]
    assert (train["evaluate_only"], train["checkpoint"]["every_steps"]) == (True, None)
    assert config["model"]["init_from"] is None
    assert train["checkpoint"]["resume_from"] == str(run.path / "checkpoints")
    assert (config["seed"], config["model"]["num_layers"], config["attention"]["window_tokens"]) == (11, 2, 96)
    assert (document["world_size"], document["exp"]) == (2, "mine-eval")
    assert Path(document["path"]).parent.name == "mine-eval"


def test_overrides_of_eval_change_only_their_settings(burst: Any, run: RunFolder) -> None:
    changes = ("--step", "10", "attention=ring", "train.seq_len=1024", "train.eval_needle_depths=4")
    config = planned(burst, "abcdef", *changes)["config"]
    train, attention = config["train"], config["attention"]
    assert train["checkpoint"]["resume_from"] == str(run.path / "checkpoints/step-00000010")
    assert (attention["preset"], attention["mask"], attention["window_tokens"]) == ("ring", "window", 96)
    assert (train["seq_len"], train["eval_needle_depths"], train["eval_position_buckets"]) == (1024, 4, 3)
    assert [path.name for path in run.path.parent.parent.iterdir()] == ["mine"]  # a rehearsal creates nothing


@pytest.mark.parametrize("name", ["it's here", "it\\'s here"])
def test_weights_may_lie_where_the_settings_say(burst: Any, run: RunFolder, tmp_path: Path, name: str) -> None:
    store = tmp_path / name
    settings = replace(CONFIG.train, checkpoint=CheckpointConfig(every_steps=1, folder=str(store)))
    (run.path / "config.yaml").write_text(dump_config(replace(CONFIG, train=settings)))
    save_checkpoint(store / run.run_id, 30)
    config = planned(burst, "mine")["config"]
    assert config["train"]["checkpoint"]["resume_from"] == str(store / run.run_id)


def test_an_experiment_is_evaluated_without_a_run(burst: Any, tmp_path: Path) -> None:
    source = ("train.checkpoint.resume_from=/some/where", "cluster.ranks_per_node=1", "attention=single")
    document = planned(burst, "exp=toy_8k", *source)
    train = document["config"]["train"]
    assert (document["exp"], train["evaluate_only"], train["seq_len"]) == ("toy_8k-eval", True, 8192)


def test_mistakes_are_named(burst: Any, run: RunFolder) -> None:
    create_run(run.path.parents[1] / "bare/20260101-000000-aaaaaa", {"config.yaml": dump_config(CONFIG)})
    for words, code, message in [
        (("exp=tiny",), 2, "train.evaluate_only=true evaluates weights that are there, but none are named"),
        (("--step", "5", "exp=tiny"), 2, "--step 5 is of a run, but none is named"),
        (("nothing",), 2, "nothing: no such run or experiment"),
        (("mine", "--step", "15"), 1, "has no checkpoint of step 15; it has 20, 10"),
        (("mine", "exp=tiny"), 2, "the run says what is evaluated, so exp= cannot"),
        (("mine", "train.seqlen=5"), 2, "did you mean train.seq_len?"),
        (("mine", "tiny"), 2, "expected KEY=VALUE"),
        (("mine", "attention=rng"), 2, "did you mean attention=ring?"),
        (("mine", "train.seq_len=512,1024"), 2, "a list of values is a sweep"),
        (("bare",), 1, "has no checkpoint under"),
        (("bare",), 1, "train.checkpoint.at_end=true"),
        ((), 2, "evaluates weights that are there, but none are named"),
        (("~exp", "exp=tiny"), 2, "evaluates weights that are there, but none are named"),
        (("mine", "train.seq_len=512", "exp=tiny"), 2, "the run says what is evaluated, so exp= cannot"),
    ]:
        result = burst("eval", *words)
        assert (result.code, message in result.err) == (code, True), result.err
        assert "Traceback" not in result.err


def test_nodes_over_ssh_find_their_own_run_folders_each_in_its_own_home(burst: Any, run: RunFolder) -> None:
    plan = planned(burst, "mine")
    plan |= {"launcher": "ssh", "path": str(run.path), "run_id": run.run_id, "exp": "mine"}
    plan["nodes"][0] |= {"folder": f"/home/u/.burst/runs/{run.run_id}"}
    plan.pop("files")
    for cluster, folder, expected in (
        (None, None, f"~/.burst/runs/{run.run_id}/checkpoints"),
        ("/scratch/", None, f"/scratch/runs/{run.run_id}/checkpoints"),
        (None, "~/saved", f"~/saved/{run.run_id}"),
        ("/scratch", "/saved/", f"/saved/{run.run_id}"),
    ):
        plan["config"]["cluster"]["node_folder"] = cluster
        plan["config"]["train"]["checkpoint"]["folder"] = folder
        (run.path / "launch.json").write_text(json.dumps(plan))
        assert weights_of(run, None) == expected
        assert weights_of(run, 40) == f"{expected}/step-00000040"
    named, queued = ClusterConfig(nodes="n[1-2]", num_nodes=2), ClusterConfig(launcher="slurm", num_nodes=2)
    for cluster, count in ((named, None), (queued, 2)):  # nodes that are named are counted anew
        (run.path / "config.yaml").write_text(dump_config(replace(CONFIG, cluster=cluster)))
        assert evaluation_base(run, "/w").cluster.num_nodes == count
