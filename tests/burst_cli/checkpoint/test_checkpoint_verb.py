"""`burst checkpoint`: what was saved is listed, compared, deleted and exported, and nothing else is."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testkit.fake_plan import TWO_RANKS, fake_plan
from testkit.run_maker import make_run
from testkit.saved_checkpoints import FILE, save_checkpoint
from testkit.terminal import styled
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig

from burst_cli.checkpoint.view import checkpoints_table
from cluster.plan import with_files
from engine.config.cluster import SshConfig
from engine.config.settings import CheckpointConfig, DataConfig, RunConfig, TrainConfig, dump_config
from engine.data.tokenizers import train_bpe
from engine.runs.checkpoints import list_checkpoints
from engine.runs.figures import binary_bytes
from engine.runs.folder import RunFolder, create_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made: RunFolder = make_run(tmp_path / "runs", state="completed")
    for step in (10, 20, 30, 40):
        save_checkpoint(made.path / "checkpoints", step, tokens=1000 * step)
    return made


def steps(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run.path / "checkpoints")]


def entry(run: RunFolder, step: int, **changes: object) -> dict[str, object]:
    """A checkpoint as it is listed for programs."""
    facts = {"step": step, "path": f"{run.path}/checkpoints/step-{step:08d}", "nodes": None, "saved_at": "now"}
    return {**facts, "bytes": 1000, "tokens": 1000 * step, "ranks": 1, "verified": False, "problem": None, **changes}


def test_checkpoints_are_listed_newest_first(burst, run: RunFolder) -> None:
    result = burst("checkpoint", "list", run.run_id)
    assert (result.code, result.err) == (0, "")
    assert [line.split() for line in result.out.splitlines()] == [
        ["step", "tokens", "size", "ranks", "saved", "where"],
        *([str(step), f"{step}K", "1000", "B", "1", "now", "here"] for step in (40, 30, 20, 10)),
    ]
    document = json.loads(burst("checkpoint", "list", "--json").out)
    assert document == {"run_id": run.run_id, "checkpoints": [entry(run, step) for step in (40, 30, 20, 10)]}


def test_fetch_names_local_checkpoints(burst, run: RunFolder) -> None:
    path = run.path / "checkpoints/step-00000020"
    assert burst("checkpoint", "fetch", "--step", "20").out == f"step 20 is in {path}\n"
    newest = {"run_id": run.run_id, "step": 40, "path": f"{run.path}/checkpoints/step-00000040"}
    assert json.loads(burst("checkpoint", "fetch", "--json").out) == newest
    missing = burst("checkpoint", "fetch", "--step", "1")
    assert (missing.code, "has no checkpoint of step 1; it has 40, 30, 20, 10" in missing.err) == (1, True)


def test_verify_reports_damage(burst, run: RunFolder) -> None:
    (run.path / "checkpoints/step-00000030" / FILE).write_bytes(b"y" * 1000)
    (run.path / "checkpoints/step-00000010/MANIFEST.json").write_text("{")
    result = burst("checkpoint", "verify", "--json")
    sound, damaged, other, unreadable = json.loads(result.out)["checkpoints"]
    assert result.code == 1
    assert [sound, other] == [entry(run, 40, verified=True), entry(run, 20, verified=True)]
    assert "SHA-256" in damaged["problem"]
    assert damaged == entry(run, 30, problem=damaged["problem"])
    unknown = dict.fromkeys(("saved_at", "bytes", "tokens", "ranks"))
    assert unreadable == entry(run, 10, problem=unreadable["problem"], **unknown)
    shown = burst("checkpoint", "verify").out.splitlines()[1:]
    assert [" ".join(line.split()) for line in shown] == [
        "40 40K 1000 B 1 now here as it was written",
        f"30 30K 1000 B 1 now here {damaged['problem']}",
        "20 20K 1000 B 1 now here as it was written",
        f"10 – – – – here {unreadable['problem']}",
    ]
    assert steps(run) == [40, 30, 20, 10]
    table = checkpoints_table(burst("checkpoint", "verify", "--json").document["checkpoints"])
    words = [("as it was written", "green"), (damaged["problem"], "red"), ("as it was written", "green")]
    assert styled(table, width=400)[6:] == [*words, (unreadable["problem"], "red")]


def test_prune_dry_run_deletes_nothing(burst, run: RunFolder) -> None:
    freed = sum(path.stat().st_size for path in (run.path / "checkpoints/step-00000010").iterdir())
    done = {"run_id": run.run_id, "removed": [10], "kept": [40, 30, 20], "freed_bytes": freed}
    words = ("checkpoint", "prune", "--keep-every", "20")
    assert json.loads(burst(*words, "--dry-run", "--json").out) == {**done, "dry_run": True}
    told = f"step 10, {binary_bytes(freed)}; kept: step 20, 30, 40\n"
    assert burst(*words, "--dry-run").out == f"would delete {told}"
    assert steps(run) == [40, 30, 20, 10]


def test_prune_deletes_old_checkpoints(burst, run: RunFolder) -> None:
    words = ("checkpoint", "prune", "--keep-every", "20")
    freed = sum(path.stat().st_size for path in (run.path / "checkpoints/step-00000010").iterdir())
    told = f"step 10, {binary_bytes(freed)}; kept: step 20, 30, 40\n"
    result = burst(*words)
    assert (result.code, result.out) == (0, f"deleted {told}")
    assert steps(run) == [40, 30, 20]
    assert burst("checkpoint", "prune", "--keep-last", "3").out == "nothing to delete; kept: step 20, 30, 40\n"
    assert burst("checkpoint", "prune", "--keep-every", "1").out == "nothing to delete; kept: step 20, 30, 40\n"
    assert burst("checkpoint", "prune").out.endswith("; kept: step 30, 40\n")


@pytest.mark.needs("ssh")
def test_nodes_are_asked_unless_their_folder_is_seen_here(burst, tmp_path: Path, monkeypatch) -> None:
    settings = TrainConfig(checkpoint=CheckpointConfig(folder=str(tmp_path / "shared")))
    cluster = replace(TWO_RANKS.cluster, ssh=SshConfig(port=1))  # where nobody listens
    plan = fake_plan(tmp_path / "runs/tiny/20260101-000000-aaaaaa", RunConfig(train=settings, cluster=cluster))
    nodes = tuple(replace(node, name="127.0.0.1", folder="/of/the/node") for node in plan.nodes)
    config = replace(plan.config, cluster=replace(plan.config.cluster, launcher="ssh", nodes="127.0.0.1"))
    written = ("config.yaml", dump_config(config))
    plan = with_files(replace(plan, launcher="ssh", nodes=nodes, config=config), written)
    made = create_run(Path(plan.run_path), dict(plan.files))
    monkeypatch.setenv("FORCE_COLOR", "1")
    colourful = burst("checkpoint", "list").err
    monkeypatch.delenv("FORCE_COLOR")
    asked = burst("checkpoint", "list")
    assert (asked.code, asked.out) == (0, f"tiny/{made.run_id} has no checkpoints.\n")
    refused = "127.0.0.1: 127.0.0.1 port 1 refuses connections; is sshd running?"
    assert asked.err == f"not asked for checkpoints: {refused}\n"
    assert f"\x1b[33mnot asked for checkpoints: {refused}\x1b[0m" in colourful
    none = f"the nodes of run {made.run_id} have no whole checkpoint{{}}; they have: none; no answer of 127.0.0.1"
    for words, of in ((("checkpoint", "fetch"), ""), (("checkpoint", "fetch", "--step", "5"), " of step 5")):
        fetched = burst(*words)
        assert (fetched.code, none.format(of) in fetched.err) == (1, True)
    evaluated = burst("eval", "tiny", "cluster.launcher=local", "cluster.nodes=null", "attention=burst")
    assert (evaluated.code, none.format("") in evaluated.err) == (1, True)
    there = burst("eval", "tiny", "attention=burst", "--hosts", "127.0.0.1")  # where the ranks look for them
    assert (there.code, there.err.startswith("error: 127.0.0.1: ssh.reach: ")) == (1, True)
    local = save_checkpoint(made.path / "checkpoints", 20)
    newest = {"run_id": made.run_id, "step": 20, "path": str(local)}
    assert burst("checkpoint", "fetch", "--json").document == newest
    shutil.rmtree(local)
    save_checkpoint(tmp_path / "shared" / made.run_id, 30)
    seen = burst("checkpoint", "list", "--json")
    assert [one["step"] for one in json.loads(seen.out)["checkpoints"]] == [30]
    assert seen.err == ""


def test_prune_spares_the_newest_undamaged_checkpoint(burst, run: RunFolder) -> None:
    for step in (30, 40):
        (run.path / f"checkpoints/step-000000{step}" / FILE).write_bytes(b"")
    passed = burst("checkpoint", "prune", "--keep-last", "1").err.splitlines()
    assert [line.partition(": ")[0] for line in passed if line] == [f"step {step} is passed over" for step in (40, 30)]
    assert steps(run) == [40, 20]


def test_checkpoints_of_a_running_run_are_not_pruned(burst, tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs", "tiny/20260102-000000-bbbbbb", state="running")
    none = burst("checkpoint", "verify", made.run_id)
    assert (none.code, none.out.strip()) == (0, f"{made.exp}/{made.run_id} has no checkpoints.")
    save_checkpoint(made.path / "checkpoints", 1)
    refused = burst("checkpoint", "prune", made.run_id)
    assert (refused.code, "has not ended" in refused.err, steps(made)) == (1, True, [1])


# --- export: transformers finds the tokenizer, and in it what begins and ends a text ----------------------------------


TEXTS = ["the quick brown fox jumps over the lazy dog " * 20]


@pytest.fixture
def export(burst, tmp_path: Path):
    """Export a run with this tokenizer: the folder of the model."""

    def exported(tokenizer: str) -> Path:
        config = RunConfig(exp="tiny", data=DataConfig(tokenizer=tokenizer))
        run = create_run(tmp_path / "runs/tiny/20260101-000000-aaaaaa", {"config.yaml": dump_config(config)})
        save_checkpoint(run.path / "checkpoints", 1, {"model.norm.weight": np.ones(4, dtype=np.float32)})
        if tokenizer == "bpe":
            train_bpe(TEXTS, 280).save(run.path)  # as rank 0 keeps it there
        step = ("--step", "1", "--file-gib", "0.001") if tokenizer == "bpe" else ()
        result = burst("checkpoint", "export", "aaaaaa", str(tmp_path / "out"), *step)
        assert result.code == 0, result.err
        assert re.match(rf"step 1: 1 file of weights, \d+ B, in {tmp_path}/out\n", result.out)
        return tmp_path / "out"

    return exported


def test_a_tokenizer_that_was_trained_for_the_run_goes_with_its_weights(export) -> None:
    folder = export("bpe")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert tokenizer.decode(tokenizer("the quick fox")["input_ids"]) == "the quick fox"
    assert config["eos_token_id"] == GenerationConfig.from_pretrained(folder).eos_token_id == 0
    assert config["bos_token_id"] is None


@pytest.mark.parametrize("spelled", [None, "<|turn|>", {"__type": "AddedToken", "content": "<|turn|>"}])
def test_beginning_and_end_are_those_of_the_tokenizer_or_of_the_files_beside_it(
    export, tmp_path: Path, spelled: Any
) -> None:
    """A tokenizer.json like that of Llama 3, which puts <|begin|> before every text."""
    train_bpe(TEXTS, 280).save(tmp_path)
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_special_tokens(["<|begin|>", "<|turn|>"])
    template = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", inner.token_to_id("<|begin|>"))])
    inner.post_processor = Sequence([template])
    inner.save(str(tmp_path / "tokenizer.json"))
    if spelled is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": spelled, "model_max_length": 9}))
    folder = export(str(tmp_path / "tokenizer.json"))
    tokenizer, config = AutoTokenizer.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|turn|>" if spelled else "<|endoftext|>")
    assert config["bos_token_id"] == tokenizer.bos_token_id == tokenizer("the")["input_ids"][0]
    assert config["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["bytes", "~no such user/tokenizer.json"])
def test_without_a_tokenizer_nothing_is_made_up(export, name: str) -> None:
    assert sorted(path.name for path in export(name).iterdir()) == ["config.json", "model.safetensors"]
