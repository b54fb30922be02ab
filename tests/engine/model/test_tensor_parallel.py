"""Tensor and sequence parallel ranks give what one rank gives: losses of twenty steps, gradients, norm, weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import (
    TinyRun,
    full_weights,
    own_part,
    random_batches,
    start_run,
    tiny_config,
    train_losses,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import RunConfig
from engine.data import Batch
from engine.errors import ConfigError
from engine.evaluate import Evaluation, evaluate
from engine.model.rope import rope_table
from engine.optim import clip_gradients
from engine.parallel.shard import LocalBatch
from engine.train_step import TrainStep, count_labels, rank_batch, sequence_loss

RELATIVE = 1e-5  # fp32 over some steps, as the project promises
FP32_TOLERANCE = 1e-6  # fp32 sums in another order
# Of a parameter's largest gradient. Those of k_proj are small differences of large terms: 1.3e-6 was seen.
GRADIENT_TOLERANCE = 3e-6
FP64_TOLERANCE = 1e-10
WEIGHT_TOLERANCE = 3e-6  # absolute, a thousandth of one update (learning rate 3e-3)
# With Adam's usual 1e-8 a gradient that is itself rounding (5e-9 was seen) moves its weight by much of an update,
# another part on every mesh. Far above rounding, and below most gradients, updates are as exact as the gradients are.
EPSILON = 1e-3
SEQ_LEN = 32
IGNORED = (31,)  # one sequence with a single label: ranks then hold different counts
STEPS = 3
STEPS_UNTIL_LEARNT = 20  # of one rank: what is compared is a model that learns
SEQUENCES = 2

GQA: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": GQA,
    "mha": {"num_heads": 4, "num_kv_heads": 4},
    "tied": {**GQA, "tie_embeddings": True},
    "biases and norms of heads": {**GQA, "qkv_bias": True, "qk_norm": True},
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {  # (ranks, sections of the configuration)
    "2 tp": (2, {"parallel": {"tp_size": 2}}),
    "4 tp": (4, {"parallel": {"tp_size": 4}}),
    "2 cp x 2 tp": (4, {"parallel": {"tp_size": 2}, "attention": {"preset": "burst", "backward_circulates": "q"}}),
    "2 dp x 2 tp": (4, {"parallel": {"tp_size": 2, "dp_shard_size": 2}}),
    "2 replicas x 2 tp": (4, {"parallel": {"tp_size": 2, "dp_replicate_size": 2}}),
}
# Every mesh, and every shape on the mesh that has the most to get wrong with it.
CASES = [
    *((name, "gqa") for name in MESHES),
    ("4 tp", "mha"),
    ("2 cp x 2 tp", "tied"),
    ("2 dp x 2 tp", "tied"),
    ("2 cp x 2 tp", "biases and norms of heads"),
]


def config_of(shape: str, **sections: Any) -> RunConfig:
    train = {"seq_len": SEQ_LEN, **sections.pop("train", {})}
    return tiny_config(model=SHAPES[shape], train=train, **sections)


def own_batch(run: TinyRun, sequences: int = SEQUENCES, ignored: tuple[int, ...] = ()) -> Batch:
    """This rank's rows of the first global batch."""
    return own_part(random_batches(0, sequences=sequences, seq_len=SEQ_LEN, ignored=ignored), run.mesh)[0]


def local_rows(run: TinyRun, batch: Batch) -> LocalBatch:
    return rank_batch(batch, run.model, run.attention, run.mesh).rows


@pytest.fixture(scope="module")
def one_rank(ranks: Pools) -> Any:
    """Losses of one rank by shape, each trained once."""
    return cache(lambda shape: ranks(1).run(train_losses, config_of(shape), SEQUENCES, STEPS_UNTIL_LEARNT)[0])


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_three_steps_give_the_losses_of_one_rank(ranks: Pools, one_rank: Any, name: str, shape: str) -> None:
    world_size, sections = MESHES[name]
    expected = one_rank(shape)
    assert expected[-1] < 0.8 * expected[0]
    for losses in ranks(world_size).run(train_losses, config_of(shape, **sections), SEQUENCES, STEPS):
        assert losses == pytest.approx(expected[:STEPS], rel=RELATIVE)


@pytest.mark.parametrize(
    "sections",
    [
        {"memory": {"activation_checkpoint": "none"}},
        {"loss": {"kind": "plain", "z_loss": 0.0}},
        {"loss": {"chunk_tokens": 2}},
    ],
    ids=["no activation checkpoint", "plain loss", "small chunks"],
)
def test_memory_and_loss_policies_change_nothing(ranks: Pools, one_rank: Any, sections: dict[str, Any]) -> None:
    config = config_of("gqa", parallel={"tp_size": 2}, **sections)
    assert ranks(2).run(train_losses, config, SEQUENCES, 5)[0] == pytest.approx(one_rank("gqa")[:5], rel=RELATIVE)


def test_micro_steps_give_the_losses_of_the_large_batch(ranks: Pools, one_rank: Any) -> None:
    config = config_of("gqa", parallel={"tp_size": 2})
    losses = ranks(2).run(train_losses, config, SEQUENCES, 5, micro_steps=2)[0]
    assert losses == pytest.approx(one_rank("gqa")[:5], rel=RELATIVE)


def test_rows_that_do_not_divide_are_padded(ranks: Pools) -> None:
    odd = {"seq_len": 30}
    expected = ranks(1).run(train_losses, config_of("gqa", train=odd), SEQUENCES, 5)[0]
    config = config_of("gqa", train=odd, parallel={"tp_size": 4})
    assert ranks(4).run(train_losses, config, SEQUENCES, 5)[0] == pytest.approx(expected, rel=RELATIVE)


def test_bf16_follows_fp32(ranks: Pools, one_rank: Any) -> None:
    config = config_of("gqa", parallel={"tp_size": 2}, train={"compute_dtype": "bfloat16"})
    losses = ranks(2).run(train_losses, config, SEQUENCES, STEPS)[0]
    assert losses == pytest.approx(
        one_rank("gqa")[:STEPS], rel=2e-2
    )  # 8 bits of mantissa; differences grow over the steps
    assert losses != pytest.approx(one_rank("gqa")[:STEPS], rel=RELATIVE)  # else it did not run in bf16


@dataclass(frozen=True)
class Facts:
    """What a run gives: weights at the start, loss, gradients and norm of the first step, weights after some steps."""

    initial: dict[str, torch.Tensor]
    loss: float
    labels: int
    gradients: dict[str, torch.Tensor]
    norm: float
    trained: dict[str, torch.Tensor]


def training_facts(config: RunConfig) -> Facts:
    """Facts of a run whose first sequence has one label: so ranks hold different counts of labels."""
    run = start_run(config)
    initial = full_weights(run.model)
    batch = own_batch(run, ignored=IGNORED)
    local = local_rows(run, batch)
    labels = count_labels([local], run.mesh.device)
    loss = sequence_loss(run.model, local, run.attention) / labels
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: whole(p.grad) for name, p in run.model.named_parameters()}
    norm = clip_gradients(run.model.parameters(), None).item()
    run.model.zero_grad()
    results = [
        run.train_step(
            step, own_part(random_batches(step, sequences=SEQUENCES, seq_len=SEQ_LEN, ignored=IGNORED), run.mesh)
        )
        for step in range(3)
    ]
    return Facts(initial, results[0].loss, labels, gradients, norm, full_weights(run.model))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_ranks_give_the_gradients_norm_and_weights_of_one(ranks: Pools, name: str, shape: str) -> None:
    world_size, sections = MESHES[name]
    optimizer = {"epsilon": EPSILON}
    expected = ranks(1).run(training_facts, config_of(shape, optimizer=optimizer))[0]
    for found in ranks(world_size).run(training_facts, config_of(shape, optimizer=optimizer, **sections)):
        assert found.labels == expected.labels == 33
        assert found.loss == pytest.approx(expected.loss, rel=FP32_TOLERANCE)
        assert found.norm == pytest.approx(expected.norm, rel=FP32_TOLERANCE)
        assert found.gradients.keys() == expected.gradients.keys()
        for parameter, tensor in expected.gradients.items():
            assert torch.equal(found.initial[parameter], expected.initial[parameter]), parameter
            difference = (found.gradients[parameter] - tensor).abs().max().item()
            assert difference <= GRADIENT_TOLERANCE * tensor.abs().max().item(), f"{parameter}: {difference}"
            moved = (found.trained[parameter] - expected.trained[parameter]).abs().max().item()
            assert moved <= WEIGHT_TOLERANCE, f"{parameter}: {moved}"


def float64_gradients(config: RunConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss sum over ranks, whole gradients) of one step of a float64 model."""
    run = start_run(config)
    run.model.double()
    batch = own_batch(run, ignored=IGNORED)
    loss = sequence_loss(run.model, local_rows(run, batch), run.attention)
    loss.backward()  # type: ignore[no-untyped-call]
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return total.item(), {name: whole(p.grad) for name, p in run.model.named_parameters()}


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize(("tp_size", "shape"), [(2, "gqa"), (4, "gqa"), (4, "mha"), (2, "tied"), (4, "tied")])
def test_float64_gradients_are_exact(ranks: Pools, tp_size: int, shape: str, policy: str) -> None:
    memory, loss = {"activation_checkpoint": policy}, {"z_loss": 0.01, "chunk_tokens": 8}
    expected_loss, expected = ranks(1).run(float64_gradients, config_of(shape, loss=loss))[0]
    config = config_of(shape, loss=loss, memory=memory, parallel={"tp_size": tp_size})
    for total, gradients in ranks(tp_size).run(float64_gradients, config):
        assert total == pytest.approx(expected_loss, rel=FP64_TOLERANCE)
        for parameter, tensor in expected.items():
            assert gradients[parameter].dtype == torch.float64
            torch.testing.assert_close(gradients[parameter], tensor, rtol=FP64_TOLERANCE, atol=FP64_TOLERANCE)


def float64_training(config: RunConfig) -> dict[str, torch.Tensor]:
    """Whole weights of a float64 model after three steps."""
    run = start_run(config)
    run.model.double()
    train_step = TrainStep(config, run.mesh, run.model, run.attention)
    for step in range(3):
        batch = random_batches(step, sequences=SEQUENCES, seq_len=SEQ_LEN, ignored=IGNORED)
        train_step(step, own_part(batch, run.mesh))
    return full_weights(run.model)


@pytest.mark.parametrize("shape", ["mha", "tied"])
def test_float64_weights_after_steps_are_exact(ranks: Pools, shape: str) -> None:
    expected = ranks(1).run(float64_training, config_of(shape))[0]
    for found in ranks(4).run(float64_training, config_of(shape, parallel={"tp_size": 4})):
        for parameter, tensor in expected.items():
            assert found[parameter].dtype == torch.float64
            torch.testing.assert_close(found[parameter], tensor, rtol=FP64_TOLERANCE, atol=FP64_TOLERANCE)


def evaluation(config: RunConfig) -> Evaluation | None:
    run = start_run(config)
    batches = [
        part
        for step in range(2)
        for part in own_part(random_batches(step, sequences=2, seq_len=SEQ_LEN, ignored=IGNORED), run.mesh)
    ]
    return evaluate(run.train_step, batches, torch.arange(64).numpy() % 5)


def test_validation_counts_every_label_once(ranks: Pools) -> None:
    expected = ranks(1).run(evaluation, config_of("gqa"))[0]
    assert expected.label_tokens == 66
    for found in ranks(4).run(evaluation, config_of("gqa", **MESHES["2 cp x 2 tp"][1])):
        assert found.label_tokens == 66
        assert found.loss == pytest.approx(expected.loss, rel=FP32_TOLERANCE)
        assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=FP32_TOLERANCE)


@dataclass
class Sent:
    """A rank's messages: all-gathers and reduce-scatters with the bytes it sends in them, all-reduces beside them."""

    calls: int = 0
    sent_bytes: float = 0.0
    all_reduces: int = 0


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of `ranks` ranks, each of which sends its part to all others."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.sent = Sent()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        self.sent.all_reduces += "all_reduce" in name or "allreduce" in name
        whole_tensor = {"c10d._allgather_base_": 0, "c10d._reduce_scatter_base_": 1}.get(name)
        if whole_tensor is not None:
            self.sent.calls += 1
            self.sent.sent_bytes += args[whole_tensor].nbytes * (self.ranks - 1) / self.ranks
        return func(*args, **(kwargs or {}))


def messages_of_the_layers(policy: str, dtype: str) -> list[Sent]:
    """[forward, backward] of the layers alone: embedding and head are left out."""
    sections = {"memory": {"activation_checkpoint": policy}, "train": {"compute_dtype": dtype}}
    run = start_run(config_of("mha", parallel={"tp_size": 4}, **sections))
    local = local_rows(run, own_batch(run, sequences=1))
    hidden = run.model.embedding(local.tokens).detach().requires_grad_()
    cos, sin = rope_table(local.positions, run.model.config.head_dim, run.model.config.rope_theta)
    with CollectiveCounter(run.mesh.tp_size) as forward:
        for layer in run.model.layers:
            hidden = layer(hidden, cos, sin, run.attention)
    with CollectiveCounter(run.mesh.tp_size) as backward:
        hidden.sum().backward()
    return [forward.sent, backward.sent]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("policy", "backward_times"), [("none", 4), ("full", 7)])
def test_a_layer_sends_its_rows_four_times_per_pass(ranks: Pools, policy: str, backward_times: int, dtype: str) -> None:
    layers, rows, width, size = 2, 32, 32, 4
    once = (size - 1) / size * rows * width * {"float32": 4, "bfloat16": 2}[dtype]
    for forward, backward in ranks(size).run(messages_of_the_layers, policy, dtype):
        assert forward == Sent(4 * layers, 4 * layers * once)
        # A recomputed layer stops before its last reduce-scatter, whose result nobody saved.
        messages = backward_times * layers
        assert backward == Sent(messages, messages * once, all_reduces=2 * layers)  # those of the norms' gains


def layer_input_rows(tp_size: int) -> int:
    run = start_run(config_of("gqa", parallel={"tp_size": tp_size}))
    rows = []
    run.model.layers[1].input_layernorm.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    local = local_rows(run, own_batch(run, sequences=1))
    sequence_loss(run.model, local, run.attention)
    return rows[0]


def test_between_layers_a_rank_holds_its_part_of_the_rows(ranks: Pools) -> None:
    assert ranks(4).run(layer_input_rows, 4) == [8] * 4


def local_shapes(tp_size: int) -> dict[str, tuple[int, ...]]:
    run = start_run(config_of("gqa", parallel={"tp_size": tp_size, "cp_size": 1}))
    return {name: tuple(parameter.to_local().shape) for name, parameter in run.model.named_parameters()}


def test_every_matrix_is_sliced_and_only_gains_are_whole(ranks: Pools) -> None:
    one, four = ranks(1).run(local_shapes, 1)[0], ranks(4).run(local_shapes, 4)[3]
    for name, shape in one.items():
        sliced = {1: 1, 2: 4}[len(shape)]
        assert math.prod(four[name]) * sliced == math.prod(shape), name


def build_error(config: RunConfig) -> tuple[str, ...]:
    try:
        start_run(config)
    except ConfigError as error:
        return error.problems
    return ()


def test_a_model_that_cannot_be_sliced_is_refused_with_every_size_and_the_legal_values(ranks: Pools) -> None:
    shape = {"num_heads": 6, "num_kv_heads": 2, "ffn_hidden_size": 62, "vocab_size": 66}
    (problems, *_) = ranks(4).run(build_error, tiny_config(model=shape, parallel={"tp_size": 4}))
    assert [name in text for name, text in zip(shape, problems, strict=True)] == [True] * 4
    assert all("legal values for this model: 1, 2" in text for text in problems)
    assert "or pad to model.vocab_size=68" in problems[3]
