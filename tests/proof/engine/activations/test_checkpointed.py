"""Layers that run tile by tile give the gradients of whole ones, whatever attention does between their halves."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from testkit.model_helpers import SHAPES, SMALL, build, make_tokens
from testkit.tiny_training import TINY, whole
from torch import Tensor

from engine.activations.checkpointed import apply_policies
from engine.activations.layer_call import LayerExecution
from engine.activations.store import DeviceStore
from engine.attention.context import AttentionGroup, SequenceContext, build_context, open_transport
from engine.attention.transport import DistributedTransport
from engine.config.errors import ConfigError
from engine.config.settings import ModelConfig
from engine.device.live_tensors import LiveTensorTracker
from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.model.llama import LlamaModel
from engine.planning.checkpoint_policy import LayerPolicy
from engine.planning.methods.layers import LayerAttention
from engine.planning.methods.presets import AttentionMethod, tile_tokens_of
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask

TOKENS = 29
CAUSAL = Mask(TOKENS)
TWO_LAYERS = {
    **{name: replace(SHAPES[name], num_layers=2) for name in ("mha", "gqa")},
    "biases and norms of heads": replace(SHAPES["biases"], num_layers=2, qk_norm=True),
}
METHOD = AttentionMethod("fpdt", "chunk_cyclic", 1, 1, "kv", "float32", chunk_tokens=7, chunk_store="host")
UNCHUNKED = AttentionMethod("alst", "contiguous", 1, 1, "kv", "float32")


def tile_layers(model: LlamaModel, tile_tokens: int, *, keep: bool) -> None:
    """Makes all layers run in tiles, keeping everything or their inputs only."""
    execution = LayerExecution(LayerPolicy("none" if keep else "full"), DeviceStore(), tile_tokens)
    apply_policies(model, [execution] * len(model.layers))


def context_of(method: AttentionMethod, mask: Mask = CAUSAL, rank: int = 0) -> SequenceContext:
    size = method.cp_size
    topology = Topology(1, size)
    transport = DistributedTransport({}, (0,), Topology(1, 1), 0)
    if size > 1:
        transport = open_transport(
            [list(range(size))], rank, topology, torch.device("cpu"), timeout=timedelta(seconds=30)
        )
    group = AttentionGroup(rank, topology, transport, ReferenceKernel())
    return build_context(group, [LayerAttention(mask, method)], mask.seq_len)


def gradients(model: LlamaModel, context: SequenceContext, tokens: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the hidden states, float64 and whole; weights [B, N, d]."""
    rows = torch.from_numpy(context.layout.positions(context.group.rank))
    hidden = model(tokens[:, rows], rows, context.functions(len(model.layers)))
    (hidden * weights[:, rows]).sum().backward()
    found = {name: whole(p.grad).double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found | {"hidden": hidden.detach()}


def weights_of(tokens: Tensor, config: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*tokens.shape, config.hidden_size, dtype=torch.float64, generator=generator)


def expected(config: ModelConfig, mask: Mask, batch: int) -> dict[str, Tensor]:
    """Gradients of whole layers."""
    tokens = make_tokens(config, batch, mask.seq_len)
    return gradients(build(config, torch.float64), context_of(UNCHUNKED, mask), tokens, weights_of(tokens, config))


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == want.keys()
    for name in want:
        assert float((found[name] - want[name]).abs().max() / want[name].abs().max()) < tolerance, name


@pytest.mark.parametrize("shape", ["mha", "gqa"])
@pytest.mark.parametrize("mask", [Mask(TOKENS), Mask(TOKENS, window=4, documents=(0, 3, 11))], ids=["causal", "packed"])
@pytest.mark.parametrize("store", ["host", "device"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.pairwise
def test_a_tiled_model_has_the_gradients_of_a_whole_one(shape, mask, store, keep):
    config = TWO_LAYERS[shape]
    want = expected(config, mask, batch=2)
    tokens = make_tokens(config, 2, TOKENS)
    for tile, method in (
        (7, replace(METHOD, chunk_store=store)),
        (5, replace(METHOD, chunk_tokens=100)),
        (8, UNCHUNKED),
    ):
        model = build(config, torch.float64)
        tile_layers(model, tile, keep=keep)
        assert_equal(gradients(model, context_of(method, mask), tokens, weights_of(tokens, config)), want)


def test_what_layers_are_called_with_is_no_dataclass() -> None:
    """FSDP2 would look for tensors in all that its fields hold: every operation of every plan, at every call."""
    assert not any(dataclasses.is_dataclass(function) for function in context_of(UNCHUNKED).functions(2))


def test_a_failing_layer_can_be_called_again():
    config = TWO_LAYERS["gqa"]
    tokens = make_tokens(config, 1, TOKENS)
    model, context = build(config, torch.float64), context_of(METHOD)
    tile_layers(model, 6, keep=True)
    want = gradients(model, context, tokens, weights_of(tokens, config))
    with pytest.raises(RuntimeError, match="size"):
        model(tokens[:, :20], torch.arange(20), context.functions(2))
    assert_equal(gradients(model, context, tokens, weights_of(tokens, config)), want)


def test_gradients_in_bf16_are_summed_over_tiles_in_fp32():
    config = TWO_LAYERS["mha"]
    mask = Mask(150)
    tokens = make_tokens(config, 1, mask.seq_len)
    weights = weights_of(tokens, config).bfloat16()
    exact = expected(config, mask, batch=1)
    errors = []
    for tile in (mask.seq_len, 1):
        model = build(config, torch.bfloat16)
        tile_layers(model, tile, keep=True)
        found = gradients(model, context_of(UNCHUNKED, mask), tokens, weights)
        errors.append({name: float((found[name] - want).norm() / want.norm()) for name, want in exact.items()})
    assert all(errors[1][name] < 1.03 * errors[0][name] for name in exact), errors  # in bf16 sums: 1.06 at most


def peak_of_a_layer(tokens: int, tile: int | None) -> int:
    """Bytes alive at most through forward and backward of one layer, beyond its input, output and parameters."""
    config = replace(SMALL, num_layers=1, ffn_hidden_size=1000)
    model = build(config)
    if tile:
        tile_layers(model, tile, keep=True)
    hidden = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
    group = AttentionGroup(0, Topology(1, 1), DistributedTransport({}, (0,), Topology(1, 1), 0), CpuFlashKernel())
    context = build_context(group, [LayerAttention(Mask(tokens), AttentionMethod())], tokens)
    angles = torch.zeros(tokens, config.head_dim // 2)
    with LiveTensorTracker() as tracker:
        tracker.watch([hidden, angles, *model.parameters()])
        before = tracker.live_bytes
        out = model.layers[0](hidden, angles, angles, context.functions(1)[0])
        out.sum().backward()
    return tracker.peak_bytes - before


def test_a_tiled_mlp_holds_a_tile_of_its_channels():
    wide = 4 * 1000 * 4  # bytes per token of the gate, up, product and their gradients, at least
    assert peak_of_a_layer(512, None) > 512 * wide
    assert peak_of_a_layer(512, 32) < 512 * wide / 2


def test_what_cannot_be_tiled_is_refused():
    config = replace(TINY, parallel=replace(TINY.parallel, tp_size=2), memory=replace(TINY.memory, tile_tokens=16))
    with pytest.raises(ConfigError, match="tp_size"):
        tile_tokens_of(config, UNCHUNKED)


def test_layers_are_tiled_if_chunks_or_tiles_are_configured():
    assert tile_tokens_of(TINY, replace(UNCHUNKED, preset="ulysses")) is None
    assert tile_tokens_of(TINY, UNCHUNKED) == TINY.model.hidden_size
    assert tile_tokens_of(TINY, METHOD) == 7
    tiled = replace(TINY, memory=replace(TINY.memory, tile_tokens=16))
    assert tile_tokens_of(tiled, UNCHUNKED) == tile_tokens_of(tiled, METHOD) == 16


def test_layers_whose_forward_passes_are_mixed_up_say_so():
    config = TWO_LAYERS["gqa"]
    model = build(config, torch.float64)
    apply_policies(model, [LayerExecution(LayerPolicy("attn_out_every", place, 2), DeviceStore()) for place in (0, 1)])
    hidden = torch.zeros(1, TOKENS, config.hidden_size, dtype=torch.float64, requires_grad=True)
    angles = torch.zeros(TOKENS, config.head_dim // 2)
    with pytest.raises(RuntimeError, match="those before it"):
        model.layers[1](hidden, angles, angles, context_of(UNCHUNKED).functions(2)[1])


def test_a_second_backward_pass_is_refused():
    config = TWO_LAYERS["gqa"]
    model = build(config, torch.float64)
    tile_layers(model, 6, keep=False)
    hidden = model(make_tokens(config, 1, TOKENS), torch.arange(TOKENS), context_of(UNCHUNKED).functions(2))
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        hidden.sum().backward()
