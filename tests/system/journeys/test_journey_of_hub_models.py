"""A model of transformers through a run and back: trained, killed, resumed on other ranks, exported, generating."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from own_logits import own_logits
from testkit.command_line import Burst
from testkit.hub_models import hf_config, reference_model
from testkit.process_table import kill_run
from testkit.ranks import Pools

from engine.runs.folder import RunFolder

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

STEPS, EVERY, DIES_AT = 50, 10, 34
PROMPT = b"line 7 of"


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a tiny model of the family, saved by transformers."""
    torch.manual_seed(1)
    document = hf_config(request.param, vocab_size=320, initializer_range=0.05)
    reference_model(document).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Runs:
    """Launches of the same training, each on some ranks."""

    def __init__(self, burst: Burst, model: Path, folder: Path) -> None:
        text = "".join(f"line {number} of a text that repeats itself\n" for number in range(1500))
        (folder / "corpus.txt").write_text(text)
        self._burst, self._model, self._folder = burst, model, folder

    def launch(self, name: str, ranks: int, *words: str) -> tuple[int, RunFolder]:
        """Return the exit code and the run."""
        family = zlib.crc32(str(self._folder).encode()) & 0xFFFFF  # no other test may end these processes
        run = RunFolder(self._folder / f"runs/tiny/20260101-000000-{family:05x}{name}")
        train = {"steps": STEPS, "seq_len": 64, "eval_samples": 2, "compute_dtype": "float32", "grad_accum_steps": 1}
        settings = [
            *(f"train.{key}={value}" for key, value in train.items()),
            *("optimizer.warmup_steps=0", "optimizer.learning_rate=1e-3", f"cluster.ranks_per_node={ranks}"),
            *("memory=attn_out", "cluster.max_restarts=0", f"train.checkpoint.every_steps={EVERY}"),
            *("data=text", f"data.paths=[{self._folder}/corpus.txt]", "data.tokenizer=bytes"),
            "data.validation_fraction=0.2",
        ]
        arguments = ("exp=tiny", "--from", str(self._model), *settings, *words, "--run-path", str(run.path))
        try:
            done = self._burst("launch", "--plain", *arguments)
        finally:
            kill_run(run.run_id)
        print(done.err)
        return done.code, run


def losses(run: RunFolder) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in run.read_metrics() if "loss" in row}


@pytest.mark.parametrize("model", ["gpt_oss", "qwen3_moe", "qwen3_next", "deepseek_v3"], indirect=True)
def test_killed_run_resumes_on_other_ranks_and_its_export_generates(
    burst: Burst, ranks: Pools, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path / "cache"))
    runs = Runs(burst, model, tmp_path)
    code, whole = runs.launch("a", 2, "attention=burst")
    assert code == 0
    code, killed = runs.launch("b", 2, "attention=burst", f'cluster.environment=["BURST_FAULT=kill;1;{DIES_AT}"]')
    assert code == 1, "its second rank was killed"
    source = f"train.checkpoint.resume_from={killed.path}"
    code, resumed = runs.launch("c", 4, "attention=ring", source)
    assert code == 0
    after = losses(resumed)
    first = DIES_AT - DIES_AT % EVERY + 1
    assert list(after) == list(range(first, STEPS + 1))
    expected = {step: loss for step, loss in losses(whole).items() if step in after}
    assert after == pytest.approx(expected, rel=1e-4), "AdamW divides rounding by small second moments"
    assert after[STEPS] < losses(whole)[1] - 0.5, "it did not learn"
    assert burst("checkpoint", "export", str(resumed.path), str(tmp_path / "out"), "--dtype", "float32").code == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.tensor([list(PROMPT)])
    written = exported.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    (ours,) = ranks(1).run(own_logits, str(resumed.path / "config.yaml"), str(resumed.path / "checkpoints"), written)
    theirs = exported(input_ids=written).logits.detach()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours[0, len(PROMPT) - 1 : -1].argmax(-1), written[0, len(PROMPT) :]), "other tokens"
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == exported.config.model_type
