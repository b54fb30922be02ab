"""Validation: weighted by tokens, in bits per byte, and without a trace in the training that goes on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from testkit.corpora import text_corpus
from testkit.ranks import Pools
from testkit.tiny_training import TINY, own_part, random_batches, start_run, tiny_config

from engine.config.settings import DataConfig, RunConfig
from engine.data.prepare import open_prepared, prepare
from engine.training.validation import evaluate, position_edges, validate

TOKEN_BYTES = np.arange(64) % 5
RELATIVE = 1e-6  # the same fp32 sums in another order
LARGE = tiny_config(model={"init_std": 0.5})  # weights so large that positions differ
IGNORED = (29, 3)  # labels that the first two rows of every batch lack


def evaluation(config: RunConfig, buckets: int = 1) -> dict[str, Any]:
    """Figures of an untrained model over two global batches of four rows."""
    run = start_run(config)
    assert evaluate(run.train_step, [], None)["validation_loss"] is None
    batches = [random_batches(step, sequences=4, ignored=IGNORED) for step in range(2)]
    parts = [part for batch in batches for part in own_part(batch, run.mesh)]
    return evaluate(run.train_step, parts, TOKEN_BYTES, buckets)


def losses_around_evaluation(config: RunConfig, evaluations: int) -> list[float]:
    """Losses of six steps with `evaluations` validations before each."""
    run = start_run(config)
    losses = []
    for step in range(6):
        for _ in range(evaluations):
            evaluate(run.train_step, own_part(random_batches(100 + step, sequences=2), run.mesh), TOKEN_BYTES)
            assert run.model.training
        losses.append(run.train_step(step, own_part(random_batches(step, sequences=2), run.mesh)).loss)
    return losses


def test_bits_per_byte_count_the_text_of_labels(ranks: Pools) -> None:
    (found,) = ranks(1).run(evaluation, TINY)
    labels = np.concatenate([random_batches(step, sequences=4, ignored=IGNORED).labels.ravel() for step in range(2)])
    text_bytes = TOKEN_BYTES[labels[labels >= 0]].sum()
    nats = found["validation_loss"] * (labels >= 0).sum()
    assert found["validation_bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=RELATIVE)


def test_validation_loss_has_no_z_loss(ranks: Pools) -> None:
    assert ranks(1).run(evaluation, tiny_config(loss={"z_loss": 1.0})) == ranks(1).run(evaluation, TINY)


def validated(config: RunConfig) -> dict[str, Any]:
    """What a run of `config` validates, before it has learned anything."""
    return validate(start_run(config).train_step, open_prepared(config.data), None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Documents of 20 to 60 bytes, 40 of them and more for validation."""
    texts = [f"document {index} says: " + "words " * (index % 7) for index in range(120)]
    data = text_corpus(tmp_path_factory.mktemp("corpus"), *texts, validation_fraction=0.4)
    prepare(data)
    return data


@pytest.mark.parametrize("documents", [True, False])
def test_validation_samples_do_not_depend_on_the_ranks(ranks: Pools, corpus: DataConfig, documents: bool) -> None:
    def run_config(dp_size: int, micro_batch_size: int = 1) -> RunConfig:
        return tiny_config(
            data=corpus,
            model={"vocab_size": 256},
            attention={"preset": "burst", "documents": documents},
            parallel={"dp_shard_size": dp_size},
            train={"eval_samples": 5, "micro_batch_size": micro_batch_size},
        )

    [expected] = ranks(1).run(validated, run_config(1))
    found = ranks(4).run(validated, run_config(2, 1 if documents else 2))[0]
    assert found == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize(
    ("seq_len", "buckets", "expected"),
    [(1024, 1, (0, 1024)), (1024, 3, (0, 256, 512, 1024)), (30, 3, (0, 7, 15, 30)), (3, 9, (0, 1, 3)), (1, 2, (0, 1))],
)
def test_buckets_double(seq_len: int, buckets: int, expected: tuple[int, ...]) -> None:
    assert position_edges(seq_len, buckets) == expected


def test_the_loss_by_position_is_that_of_only_these_labels(ranks: Pools) -> None:
    whole, found = (ranks(1).run(evaluation, LARGE, buckets)[0] for buckets in (1, 3))
    places = found.pop("validation_loss_by_position")
    assert [(bucket["first"], bucket["last"]) for bucket in places] == [(0, 6), (7, 14), (15, 29)]
    counts = np.array([2 * (7 + 7 + 4), 2 * (8 * 3), 2 * (15 * 3 + 1)])  # of four rows; the first two lack some labels
    losses = np.array([bucket["loss"] for bucket in places])
    assert (losses * counts).sum() / counts.sum() == pytest.approx(whole["validation_loss"], rel=RELATIVE)
    assert found == pytest.approx(whole, rel=RELATIVE)
    assert len({f"{loss:.3f}" for loss in losses}) == 3


@pytest.mark.parametrize(
    "sections",
    [
        {"attention": {"preset": "burst"}},
        {"parallel": {"tp_size": 2}},
        {"parallel": {"dp_shard_size": 2}},
        {"attention": {"preset": "ring"}, "loss": {"chunk_tokens": 1000}},
    ],
    ids=str,
)
def test_validation_figures_do_not_depend_on_the_ranks(ranks: Pools, sections: dict[str, Any]) -> None:
    def flat(row: dict[str, Any]) -> dict[str, float]:
        return row | {bucket["first"]: bucket["loss"] for bucket in row.pop("validation_loss_by_position")}

    expected = flat(ranks(1).run(evaluation, LARGE, 3)[0])
    for found in ranks(2).run(evaluation, tiny_config(model={"init_std": 0.5}, **sections), 3):
        assert flat(found) == pytest.approx(expected, rel=RELATIVE)


def test_evaluation_leaves_no_state_behind(ranks: Pools) -> None:
    config = tiny_config(attention={"preset": "burst"})
    plain = ranks(2).run(losses_around_evaluation, config, 0)
    assert ranks(2).run(losses_around_evaluation, config, 2) == plain


def loss_after_weights_change(config: RunConfig) -> tuple[float, float | None]:
    """(validation loss of all-zero weights that were set after an earlier validation, bits per byte of no text)."""
    run = start_run(config)
    batches = own_part(random_batches(0, sequences=2), run.mesh)
    evaluate(run.train_step, batches, None)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    row = evaluate(run.train_step, batches, None)
    return row["validation_loss"], row["validation_bits_per_byte"]


def test_weights_changed_after_an_evaluation_are_seen_by_the_next(ranks: Pools) -> None:
    for loss, bits in ranks(2).run(loss_after_weights_change, tiny_config(parallel={"dp_shard_size": 2})):
        assert loss == pytest.approx(math.log(64), rel=RELATIVE)  # all logits are equal
        assert bits is None
