"""Weights that only the ranks can read and that do not fit the run: what a person is told, by real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from testkit import PYTHON_PATH
from testkit.corpora import text_corpus
from testkit.tiny_training import tiny_config

from burst_cli.launch.launching import run_plan
from burst_cli.options import OutputOptions
from cluster.control.link import LaunchTiming
from cluster.launch.local import build_local_plan, probe_local_node
from cluster.plan import CONFIG_FILE, LaunchPlan, with_files
from engine.config.settings import RunConfig, dump_config
from engine.data.tokenizers import train_bpe
from engine.pretrained.names import EMBEDDING, HEAD
from engine.pretrained.shape import read_pretrained
from engine.runs.folder import new_run_path

TIMING = LaunchTiming(poll_s=0.05, stop_grace_s=1.0, failure_grace_s=1.0, evidence_s=0.2)


def save_tied_model(folder: Path) -> None:
    """A model of transformers with tied embeddings, 256 ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True)).save_pretrained(folder)


def with_other_head(folder: Path) -> None:
    """A head that differs from the embeddings in the last row alone, of which one rank has a part."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    head = np.array(weights[EMBEDDING])
    head[-1, -1] += 1
    save_file({**weights, HEAD: head}, path, metadata={"format": "pt"})


def with_other_tokenizer(folder: Path) -> None:
    """A tokenizer of its own, in a run on bytes."""
    train_bpe(["hello there world " * 20], 256).save(folder)


def plan_as_for_a_node(config: RunConfig, runs: Path) -> LaunchPlan:
    """Two ranks on this machine with the configuration of ranks on another: files that the launcher cannot read."""
    facts = replace(probe_local_node(), python_path=PYTHON_PATH)
    plan = build_local_plan(config, facts, new_run_path(runs, "test"))
    elsewhere = replace(plan.config.cluster, launcher="ssh", nodes="n1")
    return with_files(plan, (CONFIG_FILE, dump_config(replace(plan.config, cluster=elsewhere))))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_other_head, "tie_word_embeddings is true, but lm_head.weight differs"),
        (with_other_tokenizer, "data.tokenizer=bytes: the weights of model.init_from="),
    ],
)
def test_weights_that_do_not_fit_end_the_ranks_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], message: str
) -> None:
    save_tied_model(folder := tmp_path / "base")
    spoil(folder)
    config = tiny_config(
        data=text_corpus(tmp_path, "the quick brown fox jumps over the lazy dog\n" * 200),
        model={**asdict(read_pretrained(folder).model), "init_from": str(folder)},
        train={"eval_samples": 1, "peak_flops_per_device": 1e12},
        cluster={"ranks_per_node": 2},
        parallel={"cp_size": 1, "dp_shard_size": 2},
    )
    code = run_plan(plan_as_for_a_node(config, tmp_path / "runs"), (), OutputOptions(), TIMING)
    err = capsys.readouterr().err
    assert (code, err.count(message)) == (2, 1), f"expected exit code 2 and one message of one rank, got {err}"
    assert "Traceback" not in err
    assert "Correct the setting or file that the message names and launch again" in " ".join(err.split())
