"""Whole steps as predicted: each part against a count by hand, the sum against published steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from burst_cli.compose import compose
from engine.planning.methods.topology import place_ranks
from engine.planning.time.flops import StepTime
from engine.planning.time.machine import Machine, find_machine
from engine.planning.time.step_time import predict_step

A800 = find_machine("a800", {"inter_bytes_per_s": 12.5e9})  # four ports of 200 Gbit/s for eight devices
TINY = ["exp=tiny", "cluster.ranks_per_node=4", "memory=attn_out"]


def step_on(machine: Machine, *overrides: str) -> StepTime:
    config = compose(overrides).config
    cluster = config.cluster
    _, world = place_ranks(config.parallel, cluster.world_size or 1, cluster.topology_groups)
    return predict_step(config, world, machine)


def only(**rates: float) -> Machine:
    """A machine on which all is free but what is named."""
    free = {name: math.inf for name in vars(A800) if name.endswith("_per_s")}
    free |= {name: 0.0 for name in vars(A800) if name.endswith(("_latency_s", "_overhead_s"))}
    return replace(A800, **{**free, **rates})


@pytest.mark.parametrize(
    ("rates", "part"),
    [
        ({"matmul_flops_per_s": 1e12}, "matrices"),
        ({"elementwise_bytes_per_s": 1e9}, "elementwise"),
        ({"forward_flops_per_s": 1e12, "backward_flops_per_s": 1e12}, "attention_backward"),
        ({"inter_bytes_per_s": 1e6, "intra_bytes_per_s": 1e6}, "weights"),
    ],
)
def test_a_part_takes_time_where_its_resource_is_slow(rates: dict[str, float], part: str) -> None:
    one, half = step_on(only(**rates), *TINY), step_on(only(**{name: rate / 2 for name, rate in rates.items()}), *TINY)
    assert getattr(one.parts, part) > 0
    assert getattr(half.parts, part) == pytest.approx(2 * getattr(one.parts, part), rel=0.01)


SHAPE = {"hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 2048, "num_layers": 2}
HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
SMALL = [*TINY, *(f"model.{name}={value}" for name, value in (SHAPE | HEADS).items())]
SMALL += ["model.tie_embeddings=false", "train.seq_len=1024", "train.micro_batch_size=1"]
LAYER, HEAD, TOKENS = 4 * 64 * 64 + 3 * 64 * 128, 2048 * 64, 1024
VECTORS = 2 * 2 * 64 + 64  # gains of norms


def test_matrices_are_six_flops_per_parameter_and_token_and_two_more_where_computed_again() -> None:
    machine = only(matmul_flops_per_s=1e9)
    plain = step_on(machine, *SMALL, "memory.activation_checkpoint=none").parts
    assert plain.matrices * 4 * 1e9 == pytest.approx(6 * 2 * LAYER * TOKENS)
    assert plain.loss * 4 * 1e9 == pytest.approx(6 * HEAD * TOKENS)
    again = step_on(machine, *SMALL, "memory.activation_checkpoint=full").parts.matrices - plain.matrices
    assert again * 4 * 1e9 == pytest.approx(2 * 2 * (LAYER - 64 * 128) * TOKENS)  # all but the layer's last product


def test_tiles_add_their_gradients_of_all_weights_in_fp32() -> None:
    machine, full = only(elementwise_bytes_per_s=1e9), "memory.activation_checkpoint=full"
    whole = step_on(machine, *SMALL, full, "train.compute_dtype=bfloat16").parts.elementwise
    tiled = step_on(machine, *SMALL, full, "train.compute_dtype=bfloat16", "memory.tile_tokens=64").parts.elementwise
    tiles = TOKENS / 4 / 64
    assert (tiled - whole) * 1e9 == pytest.approx((tiles - 1) * 2 * LAYER * (2 + 4 + 4))


NUMBERS = 2 * LAYER + 2 * HEAD + VECTORS
ELSEWHERE = NUMBERS * 3 / 4  # of four ranks
BUSY = only(intra_bytes_per_s=1e9, forward_flops_per_s=1e6, backward_flops_per_s=1e6)  # hides what can be hidden
REPLICAS = ["parallel.dp_replicate_size=2", "cluster.topology_nodes=2"]


@pytest.mark.parametrize(
    ("machine", "settings", "weights", "gradients"),
    [
        # All weights are gathered twice, and their gradients are reduced in fp32.
        pytest.param(only(intra_bytes_per_s=1e9), [], 2 * 2 * ELSEWHERE, 4 * ELSEWHERE, id="nothing to hide behind"),
        pytest.param(BUSY, [], 2 * HEAD * 3 / 4, 4 * HEAD * 3 / 4, id="all but the embedding's part hides"),
        pytest.param(
            *(replace(BUSY, is_cpu=True), [], 2 * 2 * ELSEWHERE, 2 * 4 * ELSEWHERE),
            id="CPUs wait for every message, and reduce by an all-reduce",
        ),
        pytest.param(
            *(only(elementwise_bytes_per_s=1e9), [], 2 * (2 + 2) * NUMBERS, (2 + 4) * NUMBERS),
            id="packed and unpacked: two gathers, read and written",
        ),
        # Of half of the numbers, there and back, half each; weights stay inside a node.
        pytest.param(only(inter_bytes_per_s=1e9), REPLICAS, 0, 4 * NUMBERS / 2, id="replicas on two nodes"),
    ],
)
def test_fsdp_moves_what_it_must(machine: Machine, settings: list[str], weights: float, gradients: float) -> None:
    parts = step_on(machine, *SMALL, "train.compute_dtype=bfloat16", *settings).parts
    assert [parts.weights * 1e9, parts.gradients * 1e9] == pytest.approx([weights, gradients])


def test_tensor_parallel_ranks_move_rows_four_times_in_every_pass_of_a_layer() -> None:
    pair = ["parallel.tp_size=2", "train.compute_dtype=bfloat16", "memory.activation_checkpoint=none"]
    parts = step_on(only(intra_bytes_per_s=1e6), *SMALL, *pair).parts
    rows = TOKENS / 2  # four ranks, two share a row
    assert parts.tensor_parallel * 1e6 == pytest.approx(2 * 2 * 4 * rows * 64 * 2 / 2)


def test_throughput_and_mfu_follow_from_seconds() -> None:
    step = step_on(A800, *SMALL)
    assert step.tokens_per_s_per_device == pytest.approx(TOKENS / step.seconds / 4)
    pairs = TOKENS * (TOKENS + 1) / 2
    model = 6 * (2 * LAYER + HEAD) * TOKENS + 12 * 2 * 4 * 16 * pairs
    assert step.mfu(step.flops.model) == pytest.approx(model / step.seconds / 4 / 19.5e12)  # fp32 as configured
    assert step.to_dict()["mfu_full_attention"] > step.to_dict()["mfu"]


IN_BACKWARD = ["memory.optimizer_in_backward=true", "optimizer.max_grad_norm=null"]


@pytest.mark.parametrize("where", [[], IN_BACKWARD])
def test_the_hosts_update_hides_behind_computing_but_for_the_embeddings(where: list[str]) -> None:
    """Inside backward its gradient is the last to come; else the next forward pass begins with it."""
    host = ["memory.optimizer_store=host", *where]
    embedding, layer = 2048 * 256, 4 * 256 * 256 + 3 * 256 * 688  # one matrix is embedding and head
    whole_s = 28 * (embedding + 4 * layer + 9 * 256) / 200e9  # four ranks update a quarter each, and share the memory
    fast, slow = (only(forward_flops_per_s=rate, backward_flops_per_s=rate) for rate in (math.inf, 1e6))
    assert step_on(fast, *TINY, *host).parts.optimizer == pytest.approx(whole_s)  # there is nothing to hide behind
    hidden = step_on(slow, *TINY, *host).parts.optimizer / whole_s
    assert hidden == pytest.approx(embedding / (embedding + 4 * layer), rel=0.01)
    cpu = replace(slow, is_cpu=True)  # whose cores compute and update
    assert step_on(cpu, *TINY, *host).parts.optimizer == pytest.approx(whole_s)
