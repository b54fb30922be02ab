"""Needles asked of models: a copier finds them, who sees too little does not, and ranks agree with one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from testkit.needle_corpus import make_tasks, write_split
from testkit.ranks import Pools
from testkit.tiny_training import start_run, tiny_config, whole
from torch import Tensor, nn

from engine.config.settings import LossConfig, RunConfig
from engine.data.needles import NeedleTask
from engine.data.tokenizers import ByteTokenizer
from engine.loss.head import LMHead
from engine.training.validation import needle_figures, score_tasks

RELATIVE = 1e-5  # fp32 sums of the model in another order
VOCABULARY = 256
Array = np.ndarray[Any, np.dtype[Any]]


class Copier(nn.Module):
    """Repeats what followed the last 8 tokens when they came before, at most `reach` tokens ago; else knows nothing."""

    def __init__(self, layers: nn.ModuleList, reach: int) -> None:
        super().__init__()
        self.restarts_positions = False
        self.layers, self.reach = layers, reach
        self.head = LMHead(VOCABULARY, VOCABULARY, LossConfig())
        self.head.weight = nn.Parameter(torch.eye(VOCABULARY))

    def forward(self, tokens: Tensor, positions: Tensor, attention: Any) -> Tensor:
        hidden = torch.zeros(*tokens.shape, VOCABULARY)
        for row, ids in enumerate(tokens.tolist()):
            for end in range(8, len(ids) + 1):
                for start in range(end - 1, max(8, end - self.reach), -1):
                    if ids[start - 8 : start] == ids[end - 8 : end]:
                        hidden[row, end - 1, ids[start]] = 30.0
                        break
        return hidden


def copied(folder: str, reach: int, size: int) -> dict[str, Any]:
    """Figures of a copier over sequences of 260 bytes, `size` of them at a time."""
    config = tiny_config(model={"vocab_size": VOCABULARY}, train={"seq_len": 260, "micro_batch_size": size})
    train_step = start_run(config).train_step
    train_step.model = Copier(train_step.model.layers, reach)  # type: ignore[assignment]
    tokenizer = ByteTokenizer()
    texts = ("A walk by the sea, where boats of many colours come home in the evening; the wind turns, it rains. " * 9,)
    tasks = make_tasks(write_split(Path(folder), tokenizer, texts), tokenizer, 260)
    return needle_figures(score_tasks(train_step, tasks), tasks)


@pytest.mark.parametrize("size", [1, 3])
def test_who_copies_is_always_right(ranks: Pools, tmp_path: Path, size: int) -> None:
    found = ranks(1).run(copied, str(tmp_path), 1000, size)[0]
    assert found["needle_accuracy"] == 1.0
    assert [depth["accuracy"] for depth in found["needle_by_depth"]] == [1.0] * 3
    assert found["needle_gain"] == pytest.approx(np.log(256), rel=0.01)  # without the needle it knows nothing


def test_who_sees_only_what_is_near_is_right_only_there(ranks: Pools, tmp_path: Path) -> None:
    found = ranks(1).run(copied, str(tmp_path), 70, 1)[0]
    assert [depth["accuracy"] for depth in found["needle_by_depth"]] == [0.0, 0.0, 1.0]
    assert found["needle_by_depth"][0]["gain"] == pytest.approx(0.0, abs=0.01)
    assert found["needle_by_depth"][2]["gain"] > 5
    assert found["needle_accuracy"] == pytest.approx(1 / 3)


@dataclass(frozen=True)
class Scripted:
    """Tasks of which labels lie anywhere: tokens and labels [n, seq_len]."""

    tokens: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.tokens)

    def task(self, number: int) -> NeedleTask:
        return NeedleTask(self.tokens[number], self.labels[number])


def scored(config: RunConfig, tasks: Scripted) -> Array:
    return score_tasks(start_run(config).train_step, tasks)


def whole_logits(config: RunConfig, tokens: Array) -> Array:
    """[n, seq_len, V] float64: every row of logits, of one rank."""
    run = start_run(config)
    functions = run.attention.run_context().functions(len(run.model.layers))
    with torch.no_grad():
        hidden = run.model(torch.from_numpy(tokens), torch.arange(tokens.shape[1]), functions)
    return hidden.double().numpy() @ whole(run.model.head.weight).double().numpy().T


LARGE_WEIGHTS: dict[str, Any] = {"init_std": 0.5}


@pytest.fixture(scope="module")
def script(ranks: Pools) -> tuple[Scripted, Array]:
    """(five tasks with six labels each, two of three the best id, and the table that whole logits give)."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, 64, (5, 30))
    logits = ranks(1).run(whole_logits, tiny_config(model=LARGE_WEIGHTS), tokens)[0]
    labels = np.full((5, 30), -100)
    table = np.zeros((5, 3))
    for row in range(5):
        for count, place in enumerate(generator.permutation(30)[:6]):
            best = int(logits[row, place].argmax())
            label = best if count % 3 else int(generator.integers(0, 64))
            labels[row, place] = label
            nats = np.log(np.exp(logits[row, place] - logits[row, place].max()).sum()) + logits[row, place].max()
            table[row] += (nats - logits[row, place, label], label != best, 1)
    assert 0 < table[:, 1].sum() < 30
    return Scripted(tokens, labels), table


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"train": {"micro_batch_size": 2}, "loss": {"chunk_tokens": 1000}}),
    (2, {"attention": {"preset": "ring"}}),
    (2, {"attention": {"preset": "striped"}, "train": {"micro_batch_size": 2}}),
    (2, {"attention": {"preset": "burst"}, "memory": {"activation_checkpoint": "attn_out"}}),
    (2, {"attention": {"preset": "ulysses"}}),
    (2, {"parallel": {"dp_shard_size": 2}, "train": {"micro_batch_size": 2}}),
    (2, {"attention": {"preset": "burst", "documents": True, "layout": "per_document"}}),
    (2, {"parallel": {"tp_size": 2}}),
]


@pytest.mark.parametrize(("world_size", "sections"), CASES, ids=str)
def test_scores_equal_those_of_whole_logits_for_every_execution(
    ranks: Pools, script: tuple[Scripted, Array], world_size: int, sections: dict[str, Any]
) -> None:
    tasks, expected = script
    for table in ranks(world_size).run(scored, tiny_config(model=LARGE_WEIGHTS, **sections), tasks):
        np.testing.assert_allclose(table[:, 0], expected[:, 0], rtol=RELATIVE)
        np.testing.assert_array_equal(table[:, 1:], expected[:, 1:])


def tied(config: RunConfig, tasks: Scripted) -> tuple[Array, Array, bool]:
    """(table, whole logits of this rank's model, whether it trains on) with one matrix for embedding and head."""
    run = start_run(config)
    table = score_tasks(run.train_step, tasks)
    return table, whole(run.model.head.weight).numpy(), run.model.training


def test_tied_embeddings_are_gathered_for_the_answers_too(ranks: Pools, script: tuple[Scripted, Array]) -> None:
    tasks, _ = script
    config = tiny_config(model={**LARGE_WEIGHTS, "tie_embeddings": True})
    expected = ranks(1).run(tied, config, tasks)[0]
    for table, weight, trains in ranks(2).run(
        tied, tiny_config(model=vars(config.model), attention={"preset": "ring"}), tasks
    ):
        np.testing.assert_allclose(table, expected[0], rtol=RELATIVE)
        np.testing.assert_array_equal(weight, expected[1])
        assert trains


def test_figures_are_means_over_samples(tmp_path: Path) -> None:
    tasks = make_tasks(write_split(tmp_path, ByteTokenizer()), ByteTokenizer(), 300, depths=2, samples=2)
    sums = [[6.0, 0, 6], [12.0, 2, 6], [30.0, 6, 6], [6.0, 0, 6], [6.0, 0, 6], [24.0, 5, 6]]
    found = needle_figures(np.array(sums), tasks)
    assert found["needle_accuracy"] == 0.75
    assert found["needle_gain"] == pytest.approx((4 + 3 + 3 + 3) / 4)
    first, second = found["needle_by_depth"]
    assert first == {"depth": 0.0, "position": 0, "accuracy": 1.0, "loss": 1.0, "gain": 3.5}
    assert second["depth"] == 1.0
    assert second["accuracy"] == 0.5
    assert second["loss"] == 1.5
    assert second["gain"] == 3.0
