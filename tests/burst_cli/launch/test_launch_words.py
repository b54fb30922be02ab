"""`burst launch` as it is typed: rehearsals, data and recipes that cannot start, and what is told at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.text import Text
from testkit.command_line import Burst
from testkit.fake_plan import CODE, node_facts, nodes, run_config
from testkit.terminal import styled

from burst_cli.compose import compose
from burst_cli.launch.launching import conclude
from burst_cli.launch.show import show_job, show_plan
from cluster.control.link import LaunchOutcome, Leftover
from cluster.launch.local import build_local_plan
from cluster.launch.ssh import build_ssh_plan
from cluster.plan import with_files
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, dump_config
from engine.data.tokenizers import train_bpe
from engine.runs.folder import create_run


def test_dry_run_creates_nothing(tmp_path: Path, burst: Burst) -> None:
    one_core = ("cluster.backend=gloo", "cluster.ranks_per_node=1", "cluster.threads_per_rank=1")
    code, output, _ = burst("launch", "exp=tiny", "train.steps=3", *one_core, "--dry-run")
    notes = "optimizer.warmup_steps is 3, not 10: the run has 3 steps", "expected: 1.27 s per step, 0:04 for 3 steps"
    assert code == 0
    for text in (*notes, "torch.distributed.run", "OMP_NUM_THREADS=", "seq_len:"):
        assert text in output
    document = burst("launch", "exp=tiny", "--dry-run", "--json").document
    (node,) = document["nodes"]
    assert node["command"][-1] == f"{document['path']}/config.yaml"
    assert document["files"]["plan.sh"].rstrip().endswith("config.yaml")
    pods = ("cluster=k8s", "cluster.kubernetes.claim=runs", "cluster.container.image=registry.example/burst:1")
    job = burst("launch", "exp=tiny", *pods, "--as", "kubernetes", "--dry-run")
    assert (job.code, yaml.safe_load(job.out)["kind"]) == (0, "JobSet")
    assert "add --dry-run" in burst("launch", "exp=tiny", *pods, "--as", "skypilot").err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_many_nodes_shows_two_environments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, more in ((3, False), (4, True)):
        plan = build_ssh_plan(run_config(), nodes(count), CODE, Path("/runs/tiny/20260101-000000-abcdef"))
        show_plan(plan, None, ["n1 is odd"], ["n2 is good"], as_json=False)
        out = capsys.readouterr().out
        head = "run folder  /runs/tiny/20260101-000000-abcdef  (dry run: not created)"
        ranks = f"ranks       {count} ranks on {count} nodes (n[1-{count}]), by ssh"
        told = [f"backend     gloo, {plan.backend.reason}", "n2 is good", "warning: n1 is odd", "", "command on n1"]
        assert out.splitlines()[:7] == [head, ranks, *told]
        told_of = [number for number in range(1, count + 1) if f"\nenv/n{number}.env\n" in out]
        assert told_of == ([1, 2] if more else [1, 2, 3])
        assert ("\n2 more files like env/n1.env: see --json\n" in out) == more
        show_plan(plan, None, ["n1 is odd"], ["n2 is good"], as_json=True)
        out, err = capsys.readouterr()
        assert (json.loads(out), err) == (plan.to_dict(), "n2 is good\nwarning: n1 is odd\n")
    here = build_local_plan(RunConfig(), node_facts("here"), Path("/runs/tiny/20260101-000000-abcdef"))
    files = (*((name, "") for name in ("a", "job.yaml", "job.sbatch")), *here.files)
    monkeypatch.setenv("FORCE_COLOR", "1")
    show_plan(with_files(replace(here, files=()), *files), None, ["it is odd"], as_json=False)
    told = Text.from_ansi(capsys.readouterr().out)
    headings = [(name, "bold") for name in ("run folder", "ranks", "backend", "plan.sh")]
    assert {*headings, ("(dry run: not created)", "yellow"), ("warning: it is odd", "yellow")} < set(styled(told))
    shown = [line for line in told.plain.splitlines() if line and " " not in line]
    assert shown == ["plan.sh", "job.sbatch", "job.yaml", "env/here.env", "config.yaml", "a"]
    with pytest.raises(ConfigError, match="--as skypilot needs"):
        show_job(here, "skypilot")


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (("model.vocab_size=270",), 2, "model.vocab_size: got 270, but the tokenizer has 280 tokens"),
        (("train.seq_len=100000", "model.vocab_size=280", "--force"), 1, "train.seq_len"),
        (("train.seq_len=32", "train.eval_needle_depths=2"), 2, "sentence, question and answer take up to"),
    ],
)
def test_data_that_does_not_suit_the_model_leaves_no_run(
    burst: Burst, tmp_path: Path, settings: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not to be\n" * 500)
    train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 280).save(tmp_path)
    paths = (f"data.paths=[{tmp_path}/corpus.txt]", f"data.tokenizer={tmp_path}/tokenizer.json")
    data = ("data=text", *paths, f"data.prepared_dir={tmp_path}/ready")
    result = burst("launch", "exp=tiny", *data, "data.validation_fraction=0.2", *settings)
    assert (result.code, said in result.err) == (code, True), result.err
    assert not (tmp_path / "runs").exists()


TRAINED = {
    **{"steps": 120, "dropped_steps": 3, "final_train_loss": 2.0, "tokens_per_s_per_device": 12345.0},
    **{"final_validation_loss": 2.5, "final_validation_bits_per_byte": 1.25, "mfu": 0.25, "peak_memory_bytes": 2**30},
}
EVALUATED = {
    **{"evaluated_run": "20260101-000000-bbbbbb", "evaluated_step": 80, "seq_len": 8192},
    **{"final_validation_loss": 2.5, "final_validation_bits_per_byte": 1.25},
}
MORE = "more: burst report 20260101-000000-abcdef"
RESULT = (
    "120 steps (3 dropped)  train loss 2.0000  validation loss 2.5000  bits/byte 1.2500  tokens/s per device 12.3K"
    "  MFU 25%  peak memory 1 GiB"
)
LOSSES = "validation loss 2.5000  bits/byte 1.2500 on sequences of 8,192 tokens"
UNSAVED = "weights: nothing was saved; train.checkpoint.at_end=true saves them"


def test_the_end_tells_figures_of_a_training_and_findings_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows: list[tuple[str, dict[str, Any], str | None, list[str]]] = [
        ("completed", TRAINED, None, [RESULT, MORE, UNSAVED]),
        ("completed", {"steps": 120}, "/shared/step-00000120", ["120 steps", MORE, "weights: /shared/step-00000120"]),
        ("cancelled", EVALUATED, None, ["weights of 20260101-000000-bbbbbb after step 80", LOSSES, MORE]),
    ]
    for state, summary, saved, told in rows:
        path = tmp_path / str(len(summary)) / "tiny/20260101-000000-abcdef"
        run = create_run(path, {"config.yaml": dump_config(RunConfig())})
        for step in ("starting", "running"):
            run.transition(step)
        run.write_summary(summary)
        run.transition(state)
        conclude(run, LaunchOutcome(state, 0, leftover=(Leftover("tb1", (4711,)),)), 65.0, saved, as_json=False)
        out, err = map(Text.from_ansi, capsys.readouterr())
        assert [line.rstrip() for line in out.plain.splitlines()] == [f"{state} tiny/{run.run_id} in 1:05", *told]
        colour = "green" if state == "completed" else "yellow"
        warning = "warning: may still run: tb1: processes 4711"
        assert [styled(out), styled(err)] == [[(state, colour)], [(warning, "yellow")]]


@pytest.mark.parametrize("exp", ["extend_128k", "extend_1m", "sft_128k", "toy_8k"])
def test_recipes_that_go_on_with_a_model_do_not_start_without_one(burst: Burst, exp: str) -> None:
    small = ["model=tiny", "memory=none", "cluster=local4", "train=tiny", "train.seq_len=64", "data=stdlib"]
    assert burst("config", f"exp={exp}", *small).code == 0
    result = burst("launch", f"exp={exp}", *small, "--dry-run")
    assert (result.code, "model.init_from: null" in result.err) == (2, True)
    again = burst("launch", f"exp={exp}", *small, "model.require_init_from=false", "--dry-run", "--force")
    assert again.code == 0, again.err


def test_the_first_runs_of_people_save_at_the_end() -> None:
    assert all(compose([f"exp={exp}"], []).config.train.checkpoint.at_end for exp in ("tiny", "small"))
