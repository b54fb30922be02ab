"""Latents that travel in place of keys and values: numbers, bytes, and whole models on gloo ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from testkit.tiny_models import DOCUMENTS, Trained, build, differences, make_batch, train_alone_thrice, train_divided
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from engine.attention import ContextParallel, LatentShape, latent_attention
from engine.attention.hugging_face import enable_context_parallel, model_heads
from engine.config.errors import ConfigError
from engine.config.settings import KvForm

FAMILIES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]
PLAIN, PACKED = (0,), DOCUMENTS
SIZES = (
    (2, "burst"),
    (2, "ring"),
    (4, "burst"),
    (4, "ring"),
    (4, "megatron_allgather"),
    (4, "megatron_cp"),
    (4, "striped"),
)
QUICK = [("deepseek_v3", 2, "burst", PLAIN)]
CASES = [(family, *size, documents) for family in FAMILIES for size in SIZES for documents in (PLAIN, PACKED)]
OTHERS = ["burst", "megatron_allgather", "megatron_cp"]
HEADS, SEQ_LEN, BATCH = 8, 32, 2
LATENT = LatentShape(rank=12, rope_dim=4)  # 16 numbers for 8 * (12 + 8)


alone = cache(train_alone_thrice)


@pytest.mark.parametrize(
    ("family", "size", "preset", "documents"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.thorough) for case in CASES if case not in QUICK)],
)
def test_whole_models_whose_latents_travel_equal_one_process(
    ranks: Any, family: str, size: int, preset: str, documents: tuple[int, ...]
) -> None:
    got = ranks(size).run(train_divided, family, preset, documents, "latent")
    assert differences(got, alone(family, documents)) == []


def wrapped(wrapper: str) -> Trained:
    """deepseek_v3 under what reduces gradients itself, or computes layers again; loss and gradients of this rank."""
    model, (tokens, labels) = build("deepseek_v3"), make_batch()
    parallel = ContextParallel(**vars(model_heads(model)[0]), kv_form="latent", dtype=torch.float32)
    inputs = enable_context_parallel(model, parallel).shard_inputs(tokens, labels)
    if wrapper == "checkpointing":
        model.activation_checkpointing_enable()
        loss = model(**inputs).loss
        loss.backward()
        parallel.sum_gradients(model.parameters())
    else:
        called = DistributedDataParallel(model) if wrapper == "ddp" else sharded(model)
        loss = called(**inputs).loss
        (loss * parallel.size).backward()  # it takes the mean over ranks, where the sum is wanted
    named = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}
    return Trained(loss.item(), whole, {})


def sharded(model: Any) -> Any:
    """By FSDP2, layer by layer."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp", "checkpointing"])
def test_wrapped_models_whose_latents_travel_equal_one_process(ranks: Any, wrapper: str) -> None:
    assert differences(ranks(2).run(wrapped, wrapper), alone("deepseek_v3", PLAIN)) == []


def run_autocast(kv_form: KvForm) -> float:
    """The share of the loss; all parameters have gradients."""
    model, batch = build("deepseek_v3"), make_batch()
    parallel = ContextParallel(**vars(model_heads(model)[0]), kv_form=kv_form, dtype=torch.bfloat16)
    inputs = enable_context_parallel(model, parallel).shard_inputs(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    gradient = model.model.layers[0].self_attn.kv_b_proj.weight.grad
    assert gradient.dtype == torch.float32
    assert gradient.abs().sum() > 0
    return float(loss.detach())


def test_autocast_gives_the_loss_of_one_process_to_its_precision() -> None:
    assert run_autocast("latent") == pytest.approx(alone("deepseek_v3", PLAIN).plain.loss, rel=0.02)


def saved_bytes(kv_form: KvForm) -> int:
    """Of tensors that attention alone saves for backward."""
    parallel = ContextParallel(
        num_heads=HEADS, head_dim=12, v_dim=8, latent=LATENT, kv_form=kv_form, dtype=torch.float32, preset="single"
    )
    q, c, rope = (torch.randn(1, SEQ_LEN, *shape, requires_grad=True) for shape in ((HEADS, 12), (12,), (4,)))
    sizes: list[int] = []

    def note(x: Tensor) -> Tensor:
        sizes.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        latent_attention(q, c, rope, torch.randn(HEADS * 16, 12, requires_grad=True), parallel.context(SEQ_LEN))
    return sum(sizes)


def test_backward_keeps_latents_in_place_of_keys_and_values() -> None:
    fewer = SEQ_LEN * 4 * (HEADS * (12 + 8) - LATENT.dim)  # bytes of fp32
    assert saved_bytes("expanded") - saved_bytes("latent") >= fewer


def attend(kv_form: KvForm, axes: dict[str, Any]) -> dict[str, Any]:
    """Bytes of both passes, and out and all gradients over the whole sequence, of two sequences in float64."""
    parallel = ContextParallel(
        num_heads=HEADS, head_dim=12, v_dim=8, latent=LATENT, kv_form=kv_form, dtype=torch.float64, **axes
    )
    context = parallel.context(SEQ_LEN)
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, c, rope, dout = (draw(BATCH, SEQ_LEN, *s) for s in ((HEADS, 12), (12,), (4,), (HEADS, 8)))
    q, c, rope = (context.shard(x).requires_grad_() for x in (q, c, rope))
    weight, bias = draw(HEADS * 16, 12).requires_grad_(), draw(HEADS * 16).requires_grad_()
    parallel.reset_traffic()
    out = latent_attention(q, c, rope, weight, context, bias=bias)
    forward = parallel.traffic().total
    gradients = torch.autograd.grad(out, (q, c, rope, weight, bias), context.shard(dout))
    found = dict(zip(("out", "dq", "dc", "drope"), map(context.gather, (out, *gradients[:3])), strict=True))
    for name, share in zip(("dweight", "dbias"), gradients[3:], strict=True):
        if parallel.size > 1:
            torch.distributed.all_reduce(share)
        found[name] = share
    return {"form": context.moves_latents(), "sent": (forward, parallel.traffic().total - forward), "values": found}


@pytest.mark.thorough
@pytest.mark.parametrize("backward", ["kv", "q"])
def test_latents_of_a_batch_give_what_expanded_keys_and_values_give(ranks: Any, backward: str) -> None:
    axes = {"preset": "burst", "nodes": 2, "backward_circulates": backward}
    want = ranks(1).run(attend, "expanded", {"preset": "single"})[0]["values"]
    got = ranks(4).run(attend, "latent", axes)[0]
    assert got["form"], "latents did not travel"
    errors = {name: float((got["values"][name] - value).abs().max()) for name, value in want.items()}
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("preset", ["ring", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_latents_send_a_tenth_of_the_bytes_in_both_passes(ranks: Any, preset: str) -> None:
    axes = {"preset": preset, "backward_circulates": "kv"}
    latent, expanded = (ranks(4).run(attend, form, axes) for form in ("latent", "expanded"))
    for few, many in zip(latent, expanded, strict=True):
        assert [10 * count for count in few["sent"]] == [*many["sent"]], "16 numbers per token in place of 160"


def test_divided_heads_refuse_latents_by_name() -> None:
    parallel = ContextParallel(num_heads=HEADS, head_dim=12, v_dim=8, latent=LATENT, kv_form="latent", preset="fpdt")
    with pytest.raises(ConfigError, match=r"kv_form=latent.*chunk_tokens"):
        parallel.context(SEQ_LEN)


def test_a_linear_layer_that_was_replaced_after_enabling_is_an_error() -> None:
    model = build("deepseek_v3")
    parallel = ContextParallel(**vars(model_heads(model)[0]), kv_form="latent", dtype=torch.float32)
    sharder = enable_context_parallel(model, parallel)
    attention = model.model.layers[2].self_attn
    attention.kv_b_proj = nn.Sequential(attention.kv_b_proj)
    with pytest.raises(ValueError, match="layer 2: kv_b_proj is not the linear layer that it was"):
        model(**sharder.shard_inputs(*make_batch()))


class ScaledLinear(nn.Linear):
    """As an adapter is: linear, with more than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_an_expansion_that_is_not_a_plain_linear_layer_stays_expanded() -> None:
    model = build("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = ScaledLinear
    assert [heads.latent for heads in model_heads(model)] == [None]


class AddsValues(DeepseekV3Attention):
    """Whose values reach its output by another way, too."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, self.value = super().expand_kv(kv_nope, k_rot)
        return key, self.value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, *others = super().forward(*args, **kwargs)
        return out + self.value.mean(), *others


def test_values_that_the_model_uses_beside_attention_keep_a_layer_expanded() -> None:
    """Its output would lose the gradient that does not come from attention."""
    model = build("deepseek_v3")
    model.model.layers[1].self_attn.__class__ = AddsValues
    latents = [heads.latent for heads in model_heads(model)]
    assert latents == [LatentShape(16, 4), None, LatentShape(16, 4), LatentShape(16, 4)]


def test_an_expansion_found_by_its_behaviour_needs_no_name() -> None:
    model = build("deepseek_v3")
    assert [heads.latent for heads in model_heads(model)] == [LatentShape(16, 4)]
    assert [heads.latent for heads in model_heads(build("llama"))] == [None]
