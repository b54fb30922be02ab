"""From text to a model that transformers runs, over a node that dies on the way: verbs alone, as a user types them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from own_logits import own_logits
from testkit.fault_rig import FaultRig
from testkit.ranks import Pools
from testkit.testbed_fixture import Testbeds

from engine.runs.folder import RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

STEPS, EVERY = 20, 4
END_S = 600.0
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # two implementations in fp32
PROMPT = "def read("


@pytest.fixture
def rig(testbeds: Testbeds, tmp_path: Path) -> FaultRig:
    rig = FaultRig(testbeds.make(nodes=3), testbeds.config_dir, tmp_path)
    rig.corpus.write_text(Path(os.__file__).read_text())
    return rig


def asked(rig: FaultRig, *words: str) -> dict[str, Any]:
    """The document of a verb that works."""
    done = rig.burst(*words, "--json", timeout_s=END_S)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_text_becomes_a_model_for_transformers_although_a_node_dies(
    rig: FaultRig, ranks: Pools, tmp_path: Path
) -> None:
    first, second, third = rig.testbed.node_names
    words = rig.words(
        "data.tokenizer=bpe",
        "data.bpe_vocab_size=400",
        f"data.prepared_dir={tmp_path / 'prepared'}",
        "cluster.ranks_per_node=2",
        "train.compute_dtype=float32",
        f"train.steps={STEPS}",
        f"train.checkpoint.every_steps={EVERY}",
        f"train.checkpoint.folder={tmp_path / 'saved'}",
    )
    prepared = asked(rig, "data", "prepare", *words)
    assert prepared["splits"]["train"]["tokens"] > 20 * 256
    run, newest = _lose_a_node(rig, words, (first, second))
    # What it says to whoever asks, and that the same nodes cannot go on.
    told = rig.burst("status", run.run_id)
    assert told.returncode == 1
    assert second in told.stdout
    refused = rig.burst("resume", run.run_id, "--plain", timeout_s=END_S)
    assert refused.returncode == 1
    assert second in refused.stderr
    _go_on_elsewhere(rig, run, newest, (first, third))
    evaluated = asked(rig, "eval", run.run_id)
    assert evaluated["evaluated_run"] == run.run_id
    assert evaluated["evaluated_step"] == STEPS
    assert evaluated["final_validation_loss"] == pytest.approx(run.read_metrics()[-1]["validation_loss"], rel=1e-5)
    verified = asked(rig, "checkpoint", "verify", run.run_id)["checkpoints"]
    assert [(one["step"], one["problem"]) for one in verified[:2]] == [(STEPS, None), (STEPS - EVERY, None)]
    asked(rig, "checkpoint", "export", run.run_id, str(tmp_path / "model"), "--dtype", "float32")
    _transformers_has_our_logits(ranks, run, tmp_path / "model", tmp_path / f"saved/{run.run_id}")


def _lose_a_node(rig: FaultRig, words: list[str], nodes: tuple[str, str]) -> tuple[RunFolder, str]:
    """(a run that has failed: its second node died after the second checkpoint; the checkpoint that it names)."""
    # Rank 3 is slow from then on, or the run might end before the node does.
    slow = f'cluster.environment=["BURST_FAULT=slow:3;3;{2 * EVERY + 2}"]'
    launched = rig.launch(*words, slow, "--hosts", ",".join(nodes))
    run = launched.wait_for_step(2 * EVERY + 1, END_S)
    rig.lose(run, nodes[1])
    assert launched.end(END_S) == 1, launched.said()
    assert f"FAILED tiny/{run.run_id}" in launched.said()
    assert nodes[1] in launched.said()
    (newest,) = re.findall(r"last checkpoint (\S+)", launched.said())
    assert f"`burst resume {run.run_id} --hosts NODES`" in launched.said()
    rig.wait_until_gone(run.run_id)
    return run, newest


def _go_on_elsewhere(rig: FaultRig, run: RunFolder, newest: str, nodes: tuple[str, str]) -> None:
    """The run goes on from its checkpoint `newest` to its last step, as it would have."""
    before = {row["step"]: row["loss"] for row in run.read_metrics()}
    resumed = rig.burst("resume", run.run_id, "--hosts", ",".join(nodes), "--plain", timeout_s=END_S)
    assert resumed.returncode == 0, resumed.stderr
    (restored,) = [event for event in run.read_events() if event["kind"] == "restored"]
    assert restored["step"] in (2 * EVERY, 3 * EVERY)
    assert newest.endswith(f"/step-{restored['step']:08d}")
    again = {row["step"]: row["loss"] for row in run.read_metrics()}
    assert list(again) == list(range(restored["step"] + 1, STEPS + 1))
    assert all(before[step].hex() == again[step].hex() for step in before.keys() & again.keys())


def _transformers_has_our_logits(ranks: Pools, run: RunFolder, model: Path, checkpoints: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds

    tokenizer, peer = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == PROMPT
    written = peer.generate(ids, max_new_tokens=8, do_sample=False)
    assert 0 < written.shape[1] - ids.shape[1] <= 8
    assert peer.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.decode(written[0]).startswith(PROMPT)
    (ours,) = ranks(1).run(own_logits, str(run.path / "config.yaml"), str(checkpoints), written)
    torch.testing.assert_close(ours, peer(input_ids=written).logits.detach(), **TOLERANCE)
    # Greedy decoding by our own logits writes the same.
    assert torch.equal(ours[0, ids.shape[1] - 1 : -1].argmax(-1), written[0, ids.shape[1] :])
