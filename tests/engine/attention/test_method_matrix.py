"""Every preset x topology x mask x heads equals dense float64 attention, proven by counting and by numbers.

Masks take turns over the topologies, so that every preset meets every mask several times, and on 2 x 2 ranks each mask.
"""

from __future__ import annotations

import pytest
import torch
from attention_oracle import Group, dense_visibility, errors, oracle, random_inputs, relative_errors

from engine.attention.counting import prove_pair
from engine.attention.kernels.cpu_flash import CpuFlashKernel
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.layers import attention_layers
from engine.attention.mask import Mask
from engine.attention.methods import divide_sequence, plan_method
from engine.attention.presets import PRESETS, AttentionMethod, resolve_attention
from engine.attention.topology import Topology
from engine.config import AttentionConfig, LayoutName, ModelConfig, RunConfig, TrainConfig

TOPOLOGIES = [(1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (2, 3), (3, 2), (1, 7), (7, 1), (2, 4), (4, 2)]
DISTRIBUTED = [name for name in PRESETS if name not in ("single", "megatron_tp")]
ROWS = 50  # not divisible by 2 * P for most P
SETTINGS: dict[str, dict[str, object]] = {
    "causal": {},
    "full": {"mask": "full"},
    "window smaller than a chunk": {"mask": "window", "window_tokens": 3},
    "window larger than a rank": {"mask": "window", "window_tokens": 29},
    "sink": {"mask": "sink_window", "window_tokens": 5, "sink_tokens": 2},
    "documents across every edge": {"documents": True},
    "window and documents": {"mask": "window", "window_tokens": 7, "documents": True},
    "strided blocks": {"mask": "strided", "block_tokens": 4, "block_stride": 3},
    "vertical and slash": {"mask": "vertical_slash", "block_tokens": 5, "slash_blocks": (0, 2)},
}
STARTS = (0, 1, 2, 3, 11, 23, 24, 38, 49)


def heads_of(size: int, kind: str) -> tuple[int, int]:
    return {"MHA": (2 * size, 2 * size), "GQA": (2 * size, size), "MQA": (2 * size, 1)}[kind]


def method_and_mask(
    preset: str, topology: Topology, heads: tuple[int, int], settings: dict[str, object], **axes: object
) -> tuple[AttentionMethod, Mask]:
    config = RunConfig(
        model=ModelConfig(num_heads=heads[0], num_kv_heads=heads[1], head_dim=8),
        attention=AttentionConfig(preset=preset, **settings, **axes),  # type: ignore[arg-type]
        train=TrainConfig(seq_len=ROWS),
    )
    method = resolve_attention(config, topology)
    documents = STARTS if config.attention.documents else ()
    (layer,) = attention_layers(config, method, documents)
    return layer.method, layer.mask


def check(method: AttentionMethod, mask: Mask, heads: tuple[int, int], topology: Topology) -> None:
    blocks = divide_sequence(method, -(-ROWS // topology.size) * topology.size, [mask])
    plans = plan_method(method, mask, blocks)
    for plan in (plans.forward, plans.backward):
        plan.validate()
    for late in (True, False):
        prove_pair(plans, mask, blocks, late=late)
    rows = blocks.home.seq_len
    inputs = random_inputs(rows, *heads)
    got = Group(plans, blocks, ReferenceKernel(), wire=torch.float64).run(inputs).values
    found = errors(got, oracle(inputs, dense_visibility(mask, rows)))
    assert all(error < 1e-10 for error in found.values()), found


@pytest.mark.parametrize("kind", ["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("nodes_and_ranks", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("preset", DISTRIBUTED)
@pytest.mark.pairwise
def test_preset_equals_dense_attention(preset, nodes_and_ranks, kind):
    topology = Topology(*nodes_and_ranks)
    number = DISTRIBUTED.index(preset) + TOPOLOGIES.index(nodes_and_ranks) + ["MHA", "GQA", "MQA"].index(kind)
    settings = list(SETTINGS.values())[number % len(SETTINGS)]
    axes = {"chunk_tokens": 7} if PRESETS[preset].chunked else {}
    heads = heads_of(topology.size, kind)
    method, mask = method_and_mask(preset, topology, heads, settings, **axes)
    check(method, mask, heads, topology)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("preset", DISTRIBUTED)
@pytest.mark.pairwise
def test_preset_takes_every_mask(preset, settings):
    topology = Topology(2, 2)
    axes = {"chunk_tokens": 5} if PRESETS[preset].chunked else {}
    method, mask = method_and_mask(preset, topology, (8, 4), settings, **axes)
    check(method, mask, (8, 4), topology)


LAYOUTS: list[LayoutName] = ["contiguous", "zigzag", "striped", "per_document", "balanced"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", DISTRIBUTED)
@pytest.mark.pairwise
def test_preset_takes_every_layout(preset, layout):
    topology = Topology(2, 3)
    axes = {"chunk_tokens": 5} if PRESETS[preset].chunked else {}
    settings = SETTINGS["window and documents" if layout == "per_document" else "sink"]
    method, mask = method_and_mask(preset, topology, (12, 6), settings, layout=layout, **axes)
    check(method, mask, (12, 6), topology)


LARGE_ROWS = 2048


@pytest.fixture(scope="module")
def one_kernel():
    """Inputs in bfloat16, what float64 makes of them, and the errors of the one kernel of one rank."""
    inputs = random_inputs(LARGE_ROWS, 32, 32, head_dim=16, dtype=torch.bfloat16)
    want = dense_causal(inputs)
    return inputs, want, relative_errors(on_ranks("single", Topology(1, 1), inputs), want)


# The others move the same tiles over links that these have, too.
ALIKE = [pytest.param(preset, marks=pytest.mark.thorough) for preset in ("ring", "megatron_cp", "ulysses")]


@pytest.mark.parametrize("preset", ["burst", "usp", "megatron_allgather", *ALIKE])
@pytest.mark.thorough
def test_bf16_error_is_that_of_one_kernel_up_to_32_ranks(preset, one_kernel):
    inputs, want, single = one_kernel
    got = relative_errors(on_ranks(preset, Topology(4, 8), inputs), want)
    assert all(got[name] <= 1.3 * single[name] for name in got), (got, single)


def on_ranks(preset, topology, inputs) -> dict[str, torch.Tensor]:
    """Results of causal attention by `preset` over all ranks of `topology`."""
    config = RunConfig(
        model=ModelConfig(num_heads=32, num_kv_heads=32, head_dim=16),
        attention=AttentionConfig(preset=preset),
        train=TrainConfig(seq_len=LARGE_ROWS),
    )
    method, mask = resolve_attention(config, topology), Mask(LARGE_ROWS)
    assert method.cp_size == topology.nodes * topology.local_ranks
    blocks = divide_sequence(method, LARGE_ROWS, [mask])
    return Group(plan_method(method, mask, blocks), blocks, CpuFlashKernel()).run(inputs).values


def dense_causal(inputs) -> dict[str, torch.Tensor]:
    """Causal float64 attention by torch's own dense path."""
    q, k, v = (x.double().transpose(0, 1)[None].detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.double().transpose(0, 1)[None])
    names = ("out", "dq", "dk", "dv")
    return {name: x.detach()[0].transpose(0, 1) for name, x in zip(names, (out, *grads), strict=True)}
