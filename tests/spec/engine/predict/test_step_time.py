"""Whole steps as predicted: each part against a count by hand, the sum against published steps."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, replace
from typing import Any

import pytest
from testkit.resolved import preview_of, step_of

from burst_cli.compose import compose
from engine.config.settings import AttentionConfig, MaskKind, RunConfig
from engine.planning.topology import Topology
from engine.predict.flops import StepTime
from engine.predict.machine import Machine, find_machine
from engine.predict.step_time import timed_ranks
from engine.resolve.degrees import resolve_topology

A800 = find_machine("a800", {"inter_bytes_per_s": 12.5e9})  # four ports of 200 Gbit/s for eight devices
TINY = ["exp=tiny", "cluster.ranks_per_node=4", "memory=attn_out"]


def step_on(machine: Machine, *overrides: str) -> StepTime:
    config = compose(overrides).config
    cluster = config.cluster
    _, world = resolve_topology(config.parallel, cluster.world_size or 1, cluster.topology_groups)
    return step_of(config, world, machine)


def only(**rates: Any) -> Machine:
    """A machine on which all is free but what is named."""
    free = {name: math.inf for name in vars(A800) if name.endswith("_per_s")}
    free |= {name: 0.0 for name in vars(A800) if name.endswith(("_latency_s", "_overhead_s", "_rows", "_share"))}
    return replace(A800, **{**free, **rates})


SHAPE = {"hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 2048, "num_layers": 2}
HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
SMALL = [*TINY, *(f"model.{name}={value}" for name, value in (SHAPE | HEADS).items())]
SMALL += ["model.tie_embeddings=false", "train.seq_len=1024", "train.micro_batch_size=1"]
LAYER, HEAD, TOKENS = 4 * 64 * 64 + 3 * 64 * 128, 2048 * 64, 1024
ROWS = TOKENS / 4  # of each of four ranks
NUMBERS = 2 * LAYER + 2 * HEAD + 2 * 2 * 64 + 64  # and gains of norms
ELSEWHERE = NUMBERS * 3 / 4  # of four ranks
FULL, KEEP = (f"memory.activation_checkpoint={kind}" for kind in ("full", "none"))
HALF, THRICE = "train.compute_dtype=bfloat16", "train.grad_accum_steps=3"
ALONE = ["parallel.dp_shard_size=4", "attention=single"]  # a sequence for every rank, four times the pairs
TWO_NODES, REPLICAS = "cluster.topology_nodes=2", "parallel.dp_replicate_size=2"
SHARES = ((16, 0.25), (64, 0.5))  # of a side of 32: 0.375
# Forward and backward FLOPs of both layers on a rank: two products of 16 numbers a pair and head, and five of them.
ATTEND, BACK = (2 * products * 2 * 16 * 4 * TOKENS * (TOKENS + 1) / 2 / 4 for products in (2, 5))
TRAINED, AGAIN = 6 * 2 * LAYER * ROWS, 2 * 2 * (LAYER - 64 * 128) * ROWS  # all but a layer's last product
LAYER_ROW = 4 * 64 + 6 * 64 + 2 * (64 + 64) + 3 * 128  # numbers: two norms, two sums, q and k turned, SwiGLU
RESULTS, GRADIENTS = 4 * (16 + 1), 3 * 4 * 16  # numbers of a row: out and lse; dq, dk, dv
FINISH = 4 * (4 * 16 + 4) + 2 * 4 * 16 + 4 * 4  # bytes: fp32 out and lse are read, bf16 out and fp32 lse written
KEPT = 2 * ROWS * 64 * 4  # bytes: inputs of both layers
MATRICES, FLASH, BACKWARD = "matmul_flops_per_s", "forward_flops_per_s", "backward_flops_per_s"
MEMORY, INSIDE, BETWEEN = "elementwise_bytes_per_s", "intra_bytes_per_s", "inter_bytes_per_s"
OVERHEADS = {"step_overhead_s": 10.0, "layer_overhead_s": 2.0}
COMPUTED = {
    **{"matrices": (TRAINED + AGAIN) / 1e10, "loss": 6 * HEAD * ROWS / 1e10},
    **{"attention_forward": ATTEND / 1e10, "attention_again": ATTEND / 1e10},
}
TO_HOST = {MATRICES: 1e10, FLASH: 1e10}  # and copies
FORWARD, BOTH = ATTEND + (TRAINED + 6 * HEAD * ROWS) / 3, 2 * ATTEND + TRAINED + AGAIN + 6 * HEAD * ROWS
ON_HOST, UPDATE = "memory.optimizer_store=host", 28 * NUMBERS / 200e9  # seconds
GATHER = 2 * ELSEWHERE  # bytes, all weights in bf16


def case(
    rates: dict[str, Any], *settings: str, **parts: float
) -> tuple[dict[str, Any], tuple[str, ...], dict[str, float]]:
    """Rates of a machine on which all else is free, settings, and all parts that take time."""
    return rates, settings, parts


PARTS = {
    "six FLOPs a parameter and token": case({MATRICES: 1.0}, matrices=TRAINED + AGAIN, loss=6 * HEAD * ROWS),
    "three micro-steps of two": case(
        {MATRICES: 1.0}, KEEP, THRICE, "train.micro_batch_size=2", matrices=6 * TRAINED, loss=36 * HEAD * ROWS
    ),
    "sliced products have a side less": case(
        {MATRICES: 1.0, "matmul_shares": SHARES}, KEEP, "parallel.tp_size=2",
        matrices=12 * ROWS * ((2 * 64 * 64 + 64 * 128) / 0.375 + 3 * 64 * 128 / 0.5), loss=6 * HEAD * ROWS / 0.5,
    ),
    "tiles have few rows": case(
        {MATRICES: 1.0, "matmul_shares": SHARES}, FULL, "memory.tile_tokens=16",
        matrices=(TRAINED + AGAIN) / 0.25, loss=6 * HEAD * ROWS / 0.25,
    ),
    "what moves through device memory": case(
        {MEMORY: 1.0, "elementwise_shares": ((TOKENS * 64 * 4, 0.25), (TOKENS * 2048 * 4, 0.5))}, KEEP, *ALONE, THRICE,
        attention_forward=3 * 2 * TOKENS * 4 * RESULTS, attention_backward=3 * 2 * TOKENS * 4 * GRADIENTS,
        elementwise=3 * 6 * LAYER_ROW * TOKENS * 4 / 0.25, loss=3 * 4 * 2048 * TOKENS * 4 / 0.5,
        weights=3 * 2 * (4 + 4) * NUMBERS, gradients=3 * (4 + 4) * NUMBERS,
    ),
    "tiles add their gradients in fp32": case(
        {MEMORY: 1.0}, FULL, *ALONE, HALF, "memory.tile_tokens=64", THRICE,
        attention_forward=3 * 2 * TOKENS * (4 * RESULTS + FINISH), attention_backward=3 * 2 * TOKENS * 4 * GRADIENTS,
        attention_again=3 * 2 * TOKENS * (4 * RESULTS + FINISH), loss=3 * 4 * 2048 * TOKENS * 2,
        elementwise=3 * (8 * LAYER_ROW * TOKENS * 2 + (TOKENS / 64 - 1) * 2 * LAYER * (2 + 4 + 4)),
        weights=3 * 2 * (2 + 2) * NUMBERS, gradients=3 * (2 + 4) * NUMBERS,
    ),
    "pairs": case(
        {FLASH: 1.0, BACKWARD: 2.0}, FULL,
        attention_forward=ATTEND, attention_again=ATTEND, attention_backward=BACK / 2,
    ),
    # In a ring of four three blocks come, and sums go home one step after the last: three waits, and five.
    "messages": case(
        {"intra_latency_s": 1.0, **OVERHEADS}, "attention=ring", THRICE,
        attention_exposed=3 * 2 * (3 + 5), overhead=10 + 2 * 2 * 3,
    ),
    "nothing to hide behind": case(  # all weights are gathered twice, and their gradients are reduced in fp32
        {INSIDE: 1.0}, *ALONE, HALF, THRICE, weights=3 * 2 * 2 * ELSEWHERE, gradients=3 * 4 * ELSEWHERE
    ),
    "all but the embedding's part hides": case(
        {INSIDE: 1e9, FLASH: 4.0, BACKWARD: 4.0}, HALF, *ALONE, attention_forward=ATTEND, attention_backward=BACK,
        weights=2 * HEAD * 3 / 4 / 1e9, gradients=4 * HEAD * 3 / 4 / 1e9,
    ),
    "what computing does not hide of either": case(
        {INSIDE: 1.0, FLASH: 4 * ATTEND / GATHER / 0.4, BACKWARD: 4 * BACK / GATHER}, HALF, *ALONE, THRICE,
        attention_forward=3 * 0.4 * GATHER, attention_backward=3 * GATHER,
        weights=3 * (1 - 0.4 + 1) * GATHER, gradients=3 * (2 - 1) * GATHER,
    ),
    "gradients hide first": case(
        {INSIDE: 1.0, FLASH: 4 * ATTEND / GATHER, BACKWARD: 4 * BACK / GATHER / 2.2}, HALF, *ALONE,
        attention_forward=GATHER, attention_backward=2.2 * GATHER,
        weights=(HEAD / NUMBERS + 1 - 0.2) * GATHER, gradients=HEAD / NUMBERS * 2 * GATHER,
    ),
    "CPUs wait for every message, and reduce by an all-reduce": case(
        {INSIDE: 1e9, FLASH: 4.0, BACKWARD: 4.0, "is_cpu": True}, HALF, *ALONE, THRICE,
        attention_forward=3 * ATTEND, attention_backward=3 * BACK,
        weights=3 * 2 * 2 * ELSEWHERE / 1e9, gradients=3 * 2 * 4 * ELSEWHERE / 1e9,
    ),
    # Of half of the numbers, there and back, half each; weights stay inside a node.
    "replicas on two nodes": case({BETWEEN: 1.0}, REPLICAS, TWO_NODES, gradients=4 * NUMBERS / 2),
    "a ring over two nodes has a link for each of its ranks there": case(
        {BETWEEN: 1.0}, *ALONE, TWO_NODES, weights=2 * 4 * ELSEWHERE / 2, gradients=4 * ELSEWHERE / 2
    ),
    "or all share one": case(
        {BETWEEN: 1.0, "shared_nic": True}, *ALONE, TWO_NODES, weights=2 * 4 * ELSEWHERE, gradients=4 * ELSEWHERE
    ),
    "rows are moved four times in every pass of a layer": case(
        {INSIDE: 1.0}, FULL, HALF, "parallel.tp_size=2", "parallel.dp_shard_size=2", "attention=megatron_tp",
        tensor_parallel=4 * (2 + 2 + 2) * TOKENS * 64 * 2 / 2, weights=2 * 2 * NUMBERS / 4, gradients=4 * NUMBERS / 4,
    ),
    "copies to the host behind what computes": case(
        {**TO_HOST, "host_bytes_per_s": 4e6}, FULL, "memory.activation_store=host", **COMPUTED,
        offload=2 * KEPT / 4e6 - BOTH / 1e10,
    ),
    "copies back are hidden": case(
        {**TO_HOST, "host_bytes_per_s": 5e6}, FULL, "memory.activation_store=host", **COMPUTED,
        offload=KEPT / 5e6 - FORWARD / 1e10,
    ),
    "weights, gradients and moments": case({"update_bytes_per_s": 1.0}, optimizer=28 * NUMBERS / 4),
    "of one copy of the model": case({"update_bytes_per_s": 1.0}, REPLICAS, optimizer=28 * NUMBERS / 2),
    "on the host, which four ranks share": case({BACKWARD: 1.0}, ON_HOST, attention_backward=BACK, optimizer=UPDATE),
    "behind the next forward pass, which needs the embedding": case(
        {FLASH: 1.0}, ON_HOST, attention_forward=ATTEND, optimizer=HEAD / NUMBERS * UPDATE
    ),
    "or inside backward, which ends with it": case(
        {BACKWARD: 1.0}, ON_HOST, "memory.optimizer_in_backward=true", "optimizer.max_grad_norm=null",
        attention_backward=BACK, optimizer=HEAD / NUMBERS * UPDATE,
    ),
    "and not beside what computes on the same cores": case(
        {FLASH: 1.0, "is_cpu": True}, ON_HOST, attention_forward=ATTEND, optimizer=UPDATE
    ),
    "what starts kernels beside those that are busy": case(
        {FLASH: ATTEND, **OVERHEADS}, THRICE, attention_forward=3.0, overhead=10 + 2 * 2 * 3 - 3
    ),
    "and before, on a CPU": case(
        {FLASH: ATTEND, **OVERHEADS, "is_cpu": True}, attention_forward=1.0, overhead=10 + 2 * 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_every_part_equals_a_count_by_hand(name: str) -> None:
    rates, settings, expected = PARTS[name]
    parts = asdict(step_on(only(**rates), *SMALL, *settings).parts)
    assert {part: seconds for part, seconds in parts.items() if seconds} == pytest.approx(expected)


KINDS = ["full", "seq_fraction", "attn_out", "attn_out_every"]


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), ["full", "seq_fraction"]], ids=str)
def test_attention_takes_what_its_plans_take_under_every_policy(kinds: list[str]) -> None:
    several = f"memory.checkpoint_layers=[{','.join(kinds)}]" if len(kinds) > 1 else "memory.every_layers=2"
    settings = [*SMALL, f"memory.activation_checkpoint={kinds[0]}", several, "memory.saved_fraction=0.25"]
    config, machine = compose([*settings, "train.grad_accum_steps=2"]).config, find_machine("cpu")
    parts, whole = (
        step_of(config, Topology(1, 4), machine).parts,
        preview_of(config, Topology(1, 4), machine),
    )
    found = (parts.attention_forward, parts.attention_again, parts.attention_backward, parts.attention_exposed)
    assert found == pytest.approx([2 * seconds for seconds in astuple(whole.time)])


@pytest.mark.parametrize(
    ("topology", "mask", "ranks"),
    [((4, 8), "causal", None), ((8, 8), "causal", (7, 8, 63)), ((1, 64), "full", (0, 1, 63)), ((8, 8), "window", None)],
)
def test_of_many_ranks_those_at_edges_are_timed(
    topology: tuple[int, int], mask: MaskKind, ranks: tuple[int, ...] | None
) -> None:
    attention = AttentionConfig(mask=mask, window_tokens=8)
    assert timed_ranks(RunConfig(attention=attention), Topology(*topology)) == ranks


def test_figures_follow_from_the_seconds_of_a_step() -> None:
    step = step_on(A800, *SMALL)
    pairs, all_pairs = TOKENS * (TOKENS + 1) / 2, TOKENS**2
    model, everything = (6 * (2 * LAYER + HEAD) * TOKENS + 12 * 2 * 4 * 16 * some for some in (pairs, all_pairs))
    can_do = sum(asdict(step.parts).values()) * 4 * 19.5e12  # fp32 as configured
    assert step.to_dict() == {
        "machine": "a800",
        "seconds": pytest.approx(sum(asdict(step.parts).values())),
        "parts": asdict(step.parts),
        "tokens": TOKENS,
        "tokens_per_s_per_device": pytest.approx(TOKENS / step.seconds / 4),
        "mfu": pytest.approx(model / can_do),
        "mfu_full_attention": pytest.approx(everything / can_do),
        "hfu": pytest.approx((model + 4 * AGAIN) / can_do),
    }
    assert step.device_s_per_token == pytest.approx(step.seconds * 4 / TOKENS)


def test_mfu_is_none_without_a_peak() -> None:
    assert replace(step_on(A800, *SMALL), peak_flops_per_s=None).mfu(1) is None


def test_a_step_counts_all_sequences_of_all_ranks() -> None:
    more = step_on(A800, *SMALL, THRICE, "train.micro_batch_size=5", REPLICAS, "train.peak_flops_per_device=1e12")
    assert more.tokens == 2 * 3 * 5 * TOKENS
    assert more.peak_flops_per_s == 1e12
    assert more.world_size == 4
