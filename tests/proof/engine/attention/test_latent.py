"""Latents that travel in place of keys and values: equal to dense attention of what they expand to, by every ring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testkit.attention_oracle import dense_visibility, errors
from testkit.latent_oracle import LatentInputs, build_latent_group, latent_oracle, random_latents
from testkit.resolved import method_of

from engine.config.settings import AttentionConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.layers import attention_layers
from engine.planning.program.ops import Kind, LatentShape, TokenBytes
from engine.planning.schedules.plan import plan_method
from engine.planning.topology import Topology, padded_length

ROWS, HEADS = 29, 4
EXACT = 1e-10  # float64 sums in another order; seen: 1e-14
STARTS = (0, 1, 3, 11, 20)
RINGS: dict[str, tuple[Topology, dict[str, object]]] = {
    "one rank": (Topology(1, 1), {"preset": "single"}),
    "ring": (Topology(1, 3), {"preset": "ring"}),
    "striped": (Topology(1, 4), {"preset": "striped"}),
    "burst, kv": (Topology(2, 2), {"preset": "burst", "backward_circulates": "kv"}),
    "burst, q": (Topology(2, 2), {"preset": "burst", "backward_circulates": "q"}),
    "double ring": (Topology(3, 2), {"preset": "loongtrain", "head_parallel_size": 1}),
    "reversed": (Topology(1, 4), {"preset": "megatron_cp"}),
    "reversed double ring": (
        Topology(2, 2),
        {"preset": "burst", "backward_order": "reversed", "backward_circulates": "kv"},
    ),
    "gathered": (Topology(2, 2), {"preset": "megatron_allgather"}),
}
MASKS: dict[str, dict[str, object]] = {
    "causal": {},
    "full": {"mask": "full"},
    "window": {"mask": "window", "window_tokens": 5},
    "sink": {"mask": "sink_window", "window_tokens": 5, "sink_tokens": 2},
    "documents": {"documents": True},
    "strided": {"mask": "strided", "block_tokens": 4, "block_stride": 3},
}
POLICIES = {
    "all": MemoryConfig(activation_checkpoint="none"),
    "results": MemoryConfig(activation_checkpoint="attn_out"),
    "half": MemoryConfig(activation_checkpoint="seq_fraction", saved_fraction=0.5),
    "nothing": MemoryConfig(activation_checkpoint="full"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ring", RINGS)
def test_every_ring_of_latents_equals_dense_attention(ring: str, mask: str, policy: str) -> None:
    topology, settings = RINGS[ring]
    attention = AttentionConfig(**{**settings, **MASKS[mask]})  # type: ignore[arg-type]
    model = ModelConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=8)
    config = RunConfig(model=model, attention=attention, memory=POLICIES[policy], train=TrainConfig(seq_len=ROWS))
    method = method_of(config, topology)
    (layer,) = attention_layers(config, method, STARTS if attention.documents else ())
    blocks = divide_sequence(method, padded_length(ROWS, topology.size, 1), [layer.mask])
    plans = plan_method(method, layer.mask, blocks, recompute_before=layer.recompute_before)
    inputs = random_latents(blocks.rank_layout.seq_len, HEADS, HEADS)
    result = build_latent_group(plans, blocks, topology, layer.recompute_before).run(inputs)
    found = errors(result.values, latent_oracle(inputs, dense_visibility(layer.mask, blocks.rank_layout.seq_len)))
    assert all(error < EXACT for error in found.values()), found
    sizes = TokenBytes(HEADS, HEADS, 7, 5, 8, 8, 8)
    latent = replace(sizes, latent=inputs.heads.latent)
    assert plans.forward.bytes_by_link(latent, topology) == result.forward_bytes
    moving = sizes if method.backward_circulates == "q" else latent
    assert plans.backward.bytes_by_link(moving, topology) == result.backward_bytes


def test_query_heads_may_share_expanded_heads() -> None:
    found = errors_of_a_ring(random_latents(24, num_heads=6, num_kv_heads=2), ReferenceKernel())
    assert all(error < EXACT for error in found.values()), found


def test_large_tiles_expand_a_part_of_the_heads_at_a_time() -> None:
    kernel = ReferenceKernel()
    kernel.capabilities = replace(kernel.capabilities, max_call_elements=8 * 7 * 3)
    found = errors_of_a_ring(random_latents(24, num_heads=4, num_kv_heads=4), kernel)
    assert all(error < EXACT for error in found.values()), found


def errors_of_a_ring(inputs: LatentInputs, kernel: ReferenceKernel) -> dict[str, float]:
    """Of a causal ring of three ranks."""
    config = RunConfig(attention=AttentionConfig(preset="ring"), train=TrainConfig(seq_len=len(inputs.q)))
    method = method_of(config, Topology(1, 3))
    (layer,) = attention_layers(config, method)
    blocks = divide_sequence(method, len(inputs.q), [layer.mask])
    group = build_latent_group(plan_method(method, layer.mask, blocks), blocks, Topology(1, 3), None)
    result = replace(group, kernel=kernel).run(inputs)
    return errors(result.values, latent_oracle(inputs, dense_visibility(layer.mask, len(inputs.q))))


def test_a_token_of_deepseek_v3_is_71_times_smaller_as_a_latent() -> None:
    expanded = TokenBytes(num_heads=128, num_kv_heads=128, qk_dim=192, v_dim=128)
    latent = replace(expanded, latent=LatentShape(rank=512, rope_dim=64))
    assert (expanded.of(Kind.KV), latent.of(Kind.KV)) == (2 * 128 * (192 + 128), 2 * 576)
