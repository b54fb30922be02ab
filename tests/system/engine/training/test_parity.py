"""THE table of training on several ranks: three steps, gradients, norm and weights are those of one rank.

A new preset, mesh, policy or shape of a model is a row of TABLE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import (
    TinyRun,
    accumulated,
    full_weights,
    own_part,
    random_batches,
    start_run,
    tiny_config,
    train_losses,
    whole,
)

from engine.config.settings import RunConfig
from engine.data.sampler import IGNORE_INDEX, Batch
from engine.optim.adamw import clip_gradients
from engine.planning.methods.presets import PRESETS

RELATIVE = 1e-5  # fp32 over some steps, as the project promises; seen: 5e-8
FP32_TOLERANCE = 1e-6  # fp32 sums in another order
# Of a parameter's largest gradient, where heads or a mask cut sums otherwise. Those of k_proj are small differences of
# large terms: 1.3e-6 was seen.
GRADIENT_TOLERANCE = 3e-6
WEIGHT_TOLERANCE = 3e-6  # absolute, a thousandth of one update (learning rate 3e-3)
# With Adam's usual 1e-8 a gradient that is itself rounding (5e-9 was seen) moves its weight by much of an update,
# another part on every mesh. Far above rounding, and below most gradients, updates are as exact as the gradients are.
EPSILON = 1e-3
BF16_RELATIVE = 2e-2  # bf16 has 8 bits of mantissa; differences grow over the steps
STEPS = 3
SEQUENCES = 4
IGNORED = (29, 0, 3)  # the first sequence has a single label: ranks and micro-steps hold different counts
STARTS = (0, 1, 6, 7, 20)  # a document of one token, and some that cross every chunk's edge

Sections = dict[str, Any]
GQA: Sections = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
TP_MODEL: Sections = {"model": GQA}
TIED: Sections = {"model": {**GQA, "tie_embeddings": True}}
# Every other layer sees all, and a window crosses documents.
MIXED: Sections = {"mask_layers": ("sink_window", "causal"), "window_tokens": 7, "documents": True}
BURST: Sections = {"preset": "burst", "backward_circulates": "q"}


@dataclass(frozen=True)
class Row:
    """`same` is what one rank is given too, `differs` what only the ranks are; both are sections of a configuration."""

    ranks: int
    differs: Sections
    same: Sections | None = None
    micro_steps: int = 1

    @property
    def gradient_tolerance(self) -> float:
        """Plain data and context parallelism only adds the same terms in another order."""
        sliced = self.differs.get("parallel", {}).get("tp_size", 1) > 1
        return GRADIENT_TOLERANCE if sliced or "attention" in (self.same or {}) else FP32_TOLERANCE

    def config(self, *, alone: bool = False) -> RunConfig:
        sections = self.same or {}
        if not alone:
            given = self.differs
            sections = sections | {
                name: {**sections[name], **value} if isinstance(sections.get(name), dict) else value
                for name, value in given.items()
            }
        return tiny_config(optimizer={"epsilon": EPSILON}, **sections)


def preset_row(preset: str) -> Row:
    chunks: Sections = {"chunk_tokens": 3} if PRESETS[preset].chunked else {}  # type: ignore[index]
    if preset == "megatron_tp":
        return Row(2, {"attention": {"preset": preset}, "parallel": {"tp_size": 2, "cp_size": 1}}, {"attention": MIXED})
    cluster = {"topology_nodes": 1 if preset == "megatron_allgather" else 2}
    return Row(4, {"attention": {"preset": preset, **chunks}, "cluster": cluster}, {"attention": MIXED})


TABLE: dict[str, Row] = {
    **{preset: preset_row(preset) for preset in PRESETS if preset != "single"},
    "2 replicas of 2 cp, 2 micro-steps": Row(
        4, {"attention": BURST, "parallel": {"dp_replicate_size": 2}}, micro_steps=2
    ),
    "2 shards, tied": Row(2, {"parallel": {"dp_shard_size": 2}}, TIED),
    "4 shards": Row(4, {"parallel": {"dp_shard_size": 4}}),
    "2 replicas of 2 shards": Row(4, {"parallel": {"dp_replicate_size": 2, "dp_shard_size": 2}}),
    "2 dp x 2 cp": Row(4, {"attention": BURST, "parallel": {"dp_shard_size": 2}}),
    "2 tp, 2 micro-steps": Row(2, {"parallel": {"tp_size": 2}}, TP_MODEL, micro_steps=2),
    "4 tp, as many kv heads": Row(4, {"parallel": {"tp_size": 4}}, {"model": {"num_kv_heads": 4}}),
    "2 cp x 2 tp, tied, biases and norms of heads": Row(
        4,
        {"attention": BURST, "parallel": {"tp_size": 2}},
        {"model": {**TIED["model"], "qkv_bias": True, "qk_norm": True}},
    ),
    "2 dp x 2 tp": Row(4, {"parallel": {"tp_size": 2, "dp_shard_size": 2}}, TP_MODEL),
}


@dataclass(frozen=True)
class Facts:
    """What a run gives: weights at the start, gradients and norm of the first step, losses, weights after the steps."""

    initial: dict[str, torch.Tensor]
    labels: int
    gradients: dict[str, torch.Tensor]
    norm: float
    losses: list[float]
    trained: dict[str, torch.Tensor]


def parts_of(step: int, run: TinyRun, micro_steps: int) -> list[Batch]:
    """This rank's micro-batches of the global batch: with documents one packed sequence, which is all they may be."""
    if not run.train_step.config.attention.documents:
        return own_part(random_batches(step, sequences=SEQUENCES, ignored=IGNORED), run.mesh, micro_steps=micro_steps)
    batch = random_batches(step, sequences=1, ignored=(3,))
    return own_part(Batch(batch.tokens, batch.labels, (np.array(STARTS),)), run.mesh)


def facts_of(config: RunConfig, micro_steps: int) -> Facts:
    """Facts of this rank; every rank's are the same."""
    run = start_run(config)
    initial = full_weights(run.model)
    _, labels = accumulated(run, parts_of(0, run, micro_steps))
    gradients = {name: whole(parameter.grad) for name, parameter in run.model.named_parameters()}
    norm = clip_gradients(run.model.parameters(), None).item()
    run.model.zero_grad()
    losses = [run.train_step(step, parts_of(step, run, micro_steps)).loss for step in range(STEPS)]
    return Facts(initial, labels, gradients, norm, losses, full_weights(run.model))


@pytest.fixture(scope="module")
def one_rank(ranks: Pools) -> Any:
    """Facts of one rank for the row of that name; rows that give it the same share them."""
    found: dict[str, Facts] = {}

    def facts(name: str) -> Facts:
        key = repr(TABLE[name].same)
        if key not in found:
            found[key] = ranks(1).run(facts_of, TABLE[name].config(alone=True), 1)[0]
        return found[key]

    return facts


# Rows that others stand for: attention of every preset is compared over gloo, too, and each pair of axes trains below.
ALIKE = ("ring", "striped", "megatron_cp", "megatron_hierarchical", "megatron_allgather", "megatron_tp", "loongtrain",
         "burst_ulysses", "alst", "ulysses", "usp", "2 dp x 2 cp", "2 dp x 2 tp", "4 shards", "2 replicas of 2 shards",
         )  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.thorough_for(*ALIKE)
def test_ranks_train_as_one(ranks: Pools, one_rank: Any, name: str) -> None:
    row, expected = TABLE[name], one_rank(name)
    labels = 4 * 30 - 29 - 3 if row.same is None or row.same.get("attention") != MIXED else 30 - 3
    for found in ranks(row.ranks).run(facts_of, row.config(), row.micro_steps):
        assert found.labels == expected.labels == labels
        assert found.losses == pytest.approx(expected.losses, rel=RELATIVE)
        assert found.norm == pytest.approx(expected.norm, rel=FP32_TOLERANCE)
        assert found.gradients.keys() == expected.gradients.keys() == found.initial.keys()
        for parameter, gradient in expected.gradients.items():
            assert torch.equal(found.initial[parameter], expected.initial[parameter]), f"{parameter}: first weights"
            difference = (found.gradients[parameter] - gradient).abs().max().item()
            assert difference <= row.gradient_tolerance * gradient.abs().max().item(), f"{parameter}: {difference}"
            moved = (found.trained[parameter] - expected.trained[parameter]).abs().max().item()
            assert moved <= WEIGHT_TOLERANCE, f"{parameter}: {moved}"


def test_rows_that_should_differ_do(one_rank: Any) -> None:
    names = ("4 shards", "burst", "2 dp x 2 tp", "2 shards, tied", "4 tp, as many kv heads")
    losses = [one_rank(name).losses[0] for name in names]
    assert len({round(loss, 4) for loss in losses}) == len(names)


def packed_and_apart(config: RunConfig) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """(loss, gradients) of a packed sequence, and of its documents as sequences of their own."""
    run, found = start_run(config), []
    whole_batch = random_batches(0, sequences=1)
    edges = [*STARTS, whole_batch.tokens.size]
    whole_batch.labels[0, np.array(STARTS[1:]) - 1] = IGNORE_INDEX
    packed = Batch(whole_batch.tokens, whole_batch.labels, (np.array(STARTS),))
    apart = []
    for first, after in pairwise(edges):
        tokens, labels = np.zeros_like(packed.tokens), np.full_like(packed.labels, IGNORE_INDEX)
        tokens[0, : after - first] = packed.tokens[0, first:after]
        labels[0, : after - first] = packed.labels[0, first:after]
        apart.append(Batch(tokens, labels, (np.zeros(1, dtype=np.int64),)))
    for batches in ([packed], apart):
        loss, _ = accumulated(run, batches)
        gradients = {name: whole(parameter.grad) for name, parameter in run.model.named_parameters()}
        found.append((loss.item(), gradients))
        run.model.zero_grad()
    return found


@pytest.mark.parametrize("number", [1, 2])
def test_packed_documents_train_as_each_would_alone(ranks: Pools, number: int) -> None:
    config = tiny_config(attention={"preset": "burst", "documents": True})
    for (loss, gradients), (expected_loss, expected) in ranks(number).run(packed_and_apart, config):
        assert loss == pytest.approx(expected_loss, rel=RELATIVE)
        for name, gradient in expected.items():
            difference = (gradients[name] - gradient).abs().max().item()
            assert difference <= GRADIENT_TOLERANCE * gradient.abs().max().item(), f"{name}: {difference}"


@pytest.mark.thorough_for("tp")
@pytest.mark.parametrize("sections", [{"attention": BURST}, {"parallel": {"tp_size": 2}, **TP_MODEL}], ids=["cp", "tp"])
def test_bf16_follows_fp32(ranks: Pools, sections: Sections) -> None:
    wide = tiny_config(**sections)
    narrow = replace(wide, train=replace(wide.train, compute_dtype="bfloat16"))
    expected, found = (ranks(2).run(train_losses, config, 2, STEPS)[0] for config in (wide, narrow))
    assert found == pytest.approx(expected, rel=BF16_RELATIVE)
    assert found != pytest.approx(expected, rel=RELATIVE)  # else it did not run in bf16
