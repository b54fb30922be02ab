"""Attention as a library: contexts made without a run's configuration equal dense float64 attention."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from testkit import ROOT
from testkit.attention_oracle import Inputs, dense_visibility, errors, oracle, random_inputs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engine.attention import ContextParallel, SequenceContext, attention
from engine.attention.context import HeadShape
from engine.attention.rank_info import find_topology
from engine.config.errors import ConfigError
from engine.planning.topology import Topology
from engine.planning.visibility.mask import Mask

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
EXACT = 1e-10  # float64 end to end
SEQ_LEN = 37  # divides by nothing that the ranks ask for


def make(group: Any = None, **settings: Any) -> ContextParallel:
    defaults: dict[str, Any] = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "dtype": torch.float64,
    }
    return ContextParallel(group, **(defaults | settings))


def attend(context: SequenceContext, inputs: Inputs, batch: int = 1, layer: int = 0) -> dict[str, Tensor]:
    """out, dq, dk, dv of whole sequences [N, heads, D], through `shard` and `gather`; the last of the batch."""
    whole = [torch.stack([x * (batch - i) for i in range(batch)]) for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = (context.shard(x).requires_grad_() for x in whole)
    out = attention(q, k, v, context, layer)
    grads = torch.autograd.grad(out, (q, k, v), context.shard(inputs.dout.expand(batch, -1, -1, -1)))
    named = zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)
    return {name: context.gather(x)[-1] for name, x in named}


def worst(got: dict[str, Tensor], inputs: Inputs, mask: Mask) -> float:
    want = oracle(inputs, dense_visibility(mask, mask.seq_len))
    return max(errors(got | {"lse": want["lse"]}, want).values())


def run_masks(settings: dict[str, Any], masks: list[Mask], batch: int) -> list[float]:
    """Worst error of every mask, each as one layer of the same context."""
    context = make(**settings).context(SEQ_LEN, masks)
    inputs = random_inputs(SEQ_LEN, HEADS, settings.get("num_kv_heads", KV_HEADS), HEAD_DIM)
    return [worst(attend(context, inputs, batch, layer), inputs, mask) for layer, mask in enumerate(masks)]


MASKS = [
    Mask(SEQ_LEN),
    Mask(SEQ_LEN, causal=False),
    Mask(SEQ_LEN, window=7),
    Mask(SEQ_LEN, window=5, sink=2),
    Mask(SEQ_LEN, documents=(0, 1, 11, 30)),
]
# The presets themselves: test_attention_gloo.py.
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (2, {"preset": "ring"}),
    (4, {"preset": "ulysses", "num_kv_heads": 1}),
    (4, {"preset": "usp", "nodes": 2, "placement": "context_first"}),
]


@pytest.mark.parametrize(("size", "settings"), SETTINGS, ids=str)
def test_every_mask_equals_dense_attention(ranks: Any, size: int, settings: dict[str, Any]) -> None:
    for found in ranks(size).run(run_masks, settings, MASKS, batch=2):
        assert max(found) < EXACT, found


def run_wide_keys(preset: str) -> float:
    """Heads of 24 for q and k, and of 16 for v and out."""
    inputs = random_inputs(SEQ_LEN, HEADS, KV_HEADS, 24, v_dim=16)
    context = make(preset=preset, head_dim=24, v_dim=16, kernel="cpu_flash").context(SEQ_LEN)
    return worst(attend(context, inputs, batch=2), inputs, Mask(SEQ_LEN))


@pytest.mark.parametrize("preset", ["burst", "ulysses"])
def test_heads_of_v_may_have_another_width(ranks: Any, preset: str) -> None:
    assert max(ranks(2).run(run_wide_keys, preset)) < EXACT


def run_sinks(preset: str) -> tuple[float, list[Tensor]]:
    """Worst error of out, dq, dk, dv and dsinks of a batch of two, and this rank's share of dsinks."""
    inputs = random_inputs(SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM)
    parallel = make(preset=preset)
    context = parallel.context(SEQ_LEN)
    sinks = nn.Parameter(torch.tensor([0.7, -1.3, 2.5, 0.1], dtype=torch.float64))
    q, k, v = (context.shard(x.expand(2, -1, -1, -1)).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = attention(q, k, v, context, sinks=sinks)
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)[:, None, None, None]
    out.backward(context.shard(inputs.dout * weights))
    share = sinks.grad.clone()
    parallel.sum_gradients([sinks])
    got = {name: context.gather(x)[0] for name, x in (("out", out), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad))}
    want = oracle(inputs, dense_visibility(Mask(SEQ_LEN), SEQ_LEN), sinks.detach())
    found = errors(got | {"lse": want["lse"], "dsinks": sinks.grad / 3}, want)
    return max(found.values()), [share, sinks.grad]


@pytest.mark.parametrize("preset", ["burst", "ulysses"])
def test_gradients_of_learnable_sinks_are_shares_that_sum_gradients_adds_up(ranks: Any, preset: str) -> None:
    replies = ranks(4).run(run_sinks, preset)
    assert max(error for error, _ in replies) < EXACT
    torch.testing.assert_close(sum(share for _, (share, _) in replies), replies[0][1][1], rtol=0, atol=EXACT)


def test_sinks_of_another_shape_are_refused() -> None:
    context = make().context(SEQ_LEN)
    q, k = (torch.zeros(1, SEQ_LEN, heads, HEAD_DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS))
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\), expected one number per query head: \(4,\)"):
        attention(q, k, k, context, sinks=torch.zeros(3))


LAYER_HEADS = [HeadShape(4, 2, 8, 8), HeadShape(4, 4, 24, 16), HeadShape(8, 1, 8, 4)]


def run_layer_heads(preset: str) -> list[float]:
    """Worst error of each layer."""
    context = make(preset=preset).context(SEQ_LEN, heads=LAYER_HEADS)
    found = []
    for layer, heads in enumerate(LAYER_HEADS):
        inputs = random_inputs(SEQ_LEN, heads.num_heads, heads.num_kv_heads, heads.head_dim, v_dim=heads.v_dim)
        found.append(worst(attend(context, inputs, layer=layer), inputs, Mask(SEQ_LEN)))
    return found


@pytest.mark.parametrize("preset", ["burst", "ulysses"])  # the second divides 4 and 2 kv heads and copies 1
def test_layers_may_have_different_heads(ranks: Any, preset: str) -> None:
    for found in ranks(4 if preset == "burst" else 2).run(run_layer_heads, preset):
        assert max(found) < EXACT, found


def test_heads_of_a_layer_that_the_method_cannot_divide_are_refused(ranks: Any) -> None:
    for text in ranks(4).run(refusal_of_layer_heads):
        assert "4 ranks cannot divide 6 query heads evenly, of layers with HeadShape(num_heads=6" in text


def refusal_of_layer_heads() -> str:
    with pytest.raises(ConfigError) as refused:
        make(preset="ulysses").context(SEQ_LEN, heads=[LAYER_HEADS[0], HeadShape(6, 6, 8, 8)])
    return str(refused.value)


def test_tensors_of_v_are_checked_for_their_own_width() -> None:
    context = make(head_dim=24, v_dim=16, kernel="reference").context(SEQ_LEN)
    q, k = (torch.zeros(1, SEQ_LEN, heads, 24, dtype=torch.float64) for heads in (HEADS, KV_HEADS))
    with pytest.raises(ValueError, match=rf"v has shape .*expected .* = \(1, {SEQ_LEN}, {KV_HEADS}, 16\)"):
        attention(q, k, k, context)


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    assert max(run_masks({}, MASKS, batch=2)) < EXACT
    assert make().idle_wire_s() == 0.0  # it sends nothing


def test_autocast_casts_as_torch_does() -> None:
    context = make(dtype=torch.bfloat16).context(SEQ_LEN)
    inputs = random_inputs(SEQ_LEN, HEADS, HEADS // 2, HEAD_DIM, torch.float32)
    q, k, v = (x[None] for x in (inputs.q, inputs.k, inputs.v))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v.bfloat16(), context)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), context))


def run_documents(layout: str) -> float:
    documents = (0, 9, 10, 33)
    context = make(preset="ring", layout=layout).context(SEQ_LEN, documents=documents)
    inputs = random_inputs(SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM)
    return worst(attend(context, inputs), inputs, Mask(SEQ_LEN, documents=documents))


@pytest.mark.parametrize("layout", ["per_document", "balanced"])
def test_layouts_that_are_solved_from_documents_give_unequal_rows_back_in_order(ranks: Any, layout: str) -> None:
    assert max(ranks(4).run(run_documents, layout)) < EXACT


def run_groups() -> tuple[float, list[int], int]:
    """Rank 0 alone, ranks 3 and 1 together, rank 2 alone."""
    pair, alone = dist.new_group([1, 3]), [dist.new_group([0]), dist.new_group([2])]
    rank = dist.get_rank()
    parallel = make(pair if rank % 2 else alone[rank // 2], preset="ring")
    context = parallel.context(SEQ_LEN)
    inputs = random_inputs(SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM, seed=rank % 2)
    return worst(attend(context, inputs), inputs, Mask(SEQ_LEN)), context.positions.tolist(), parallel.size


def test_each_group_shares_a_different_sequence(ranks: Any) -> None:
    results = ranks(4).run(run_groups)
    assert [size for _, _, size in results] == [1, 2, 1, 2]
    assert max(error for error, _, _ in results) < EXACT
    assert sorted(results[1][1] + results[3][1]) == list(range(40))  # padded to four chunks
    assert results[0][1] == list(range(SEQ_LEN))


def run_named_masks() -> list[float]:
    parallel = make(preset="burst", window_tokens=6, sink_tokens=3)
    inputs = random_inputs(SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM)
    context = parallel.context(SEQ_LEN, ["window", "sink_window", "causal"])
    masks = [Mask(SEQ_LEN, window=6), Mask(SEQ_LEN, window=6, sink=3), Mask(SEQ_LEN)]
    return [worst(attend(context, inputs, layer=3 + i), inputs, mask) for i, mask in enumerate(masks)]


def test_named_masks_of_layers_read_their_options_from_the_axes(ranks: Any) -> None:
    assert max(max(found) for found in ranks(2).run(run_named_masks)) < EXACT


def run_shard() -> tuple[list[int], list[int], int]:
    context = make(preset="ring").context(6)
    local = context.shard(torch.arange(10, 16), dim=0, pad_value=-100)
    return context.positions.tolist(), local.tolist(), context.padded_len


def test_shard_follows_the_padded_layout(ranks: Any) -> None:
    assert ranks(2).run(run_shard) == [([0, 1, 6, 7], [10, 11, -100, -100], 8), ([2, 3, 4, 5], [12, 13, 14, 15], 8)]


def train_experts(rows: Tensor) -> nn.ModuleList:
    """Three experts after one backward pass; a row's first number chooses its expert, and none chooses the last."""
    experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    torch.stack([experts[int(row[0])](row) for row in rows]).sum().backward()
    return experts


EXPERT_ROWS = torch.tensor([[0.0, 1.0], [0.0, 2.0], [1.0, 3.0], [1.0, 4.0]])


def run_experts() -> list[Tensor | None]:
    parallel, rank = make(), dist.get_rank()
    experts = train_experts(EXPERT_ROWS[2 * rank : 2 * rank + 2])
    parallel.sum_gradients(experts.parameters())
    return [expert.weight.grad for expert in experts]


def test_a_gradient_that_a_rank_lacks_counts_as_zeros(ranks: Any) -> None:
    """Else ranks whose tokens leave different experts idle add the gradients of different experts."""
    want = [expert.weight.grad for expert in train_experts(EXPERT_ROWS)]
    for found in ranks(2).run(run_experts):
        assert found[2] is None, "no rank has a gradient of this one, as on one process"
        torch.testing.assert_close(found[:2], want[:2])


def run_sharded_gradients() -> str:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="sharded") as caught:
        make().sum_gradients(model.parameters())
    return str(caught.value)


def test_shards_of_different_ranks_are_not_added(ranks: Any) -> None:
    assert all("FSDP reduces" in text for text in ranks(2).run(run_sharded_gradients))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"q": torch.zeros(1, 6, HEADS, HEAD_DIM)}, r"q is torch.float32, expected torch.float64"),
        ({"q": torch.zeros(1, 6, 3, HEAD_DIM)}, r"q has shape \(1, 6, 3, 8\), expected .* = \(1, 6, 4, 8\)"),
        ({"k": torch.zeros(1, 5, KV_HEADS, HEAD_DIM)}, r"k has shape .*this rank holds 6 of 6 rows"),
        ({"v": torch.zeros(2, 6, KV_HEADS, HEAD_DIM)}, r"v has shape \(2, 6, 2, 8\), expected .* = \(1, 6, 2, 8\)"),
        ({"q": torch.zeros(6, HEADS, HEAD_DIM)}, r"q has shape .*\(B, 6, 4, 8\)"),
        ({"k": torch.zeros(1, 6, KV_HEADS, HEAD_DIM, device="meta")}, r"k lies on meta, expected cpu"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_named_with_what_was_expected(changed: dict[str, Tensor], text: str) -> None:
    good = {name: torch.zeros(1, 6, heads, HEAD_DIM).double() for name, heads in zip("qkv", (4, 2, 2), strict=True)}
    with pytest.raises(ValueError, match=text):
        attention(**(good | changed), context=make().context(6))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"preset": "brust"}, "did you mean burst"),
        ({"preset": "auto"}, "auto is chosen by a run's cost model"),
        ({"layuot": "zigzag"}, "layuot"),
        ({"head_parallel_size": 0}, "head_parallel_size: got 0"),
        ({"mask": "window"}, r"mask: give it to ContextParallel.context\(mask="),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, expected a divisor of num_heads=4"),
        ({"nodes": 3}, "nodes: got 3, which does not divide the group's 1 ranks"),
        ({"head_parallel_size": 2}, "head_parallel_size 2 .* but 1 ranks share a sequence.*nearest legal"),
        ({"kernel": "aten_flash"}, "attention.kernel=aten_flash: no kernel for torch.float64"),
    ],
    ids=str,
)
def test_settings_that_are_not_legal_are_named_with_those_that_are(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**settings)


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="seq_len: got 0 tokens for 1 ranks"):
        make().context(0)


def test_masks_that_do_not_fit_are_refused() -> None:
    parallel = make()
    with pytest.raises(ConfigError, match="made for 5 tokens, but the sequence has 6"):
        parallel.context(6, Mask(5))
    with pytest.raises(ConfigError, match="other documents"):
        parallel.context(6, Mask(6, documents=(0, 2)), documents=(0, 3))
    with pytest.raises(ConfigError, match="made by queries_before"):
        parallel.context(6, Mask(6).queries_before(3))
    with pytest.raises(ConfigError, match=r"attention\.window_tokens: null"):
        parallel.context(6, "window")


def test_a_part_of_the_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the whole sequence, seq_len=6"):
        make().context(6).shard(torch.zeros(1, 5))


def run_mistaken_groups(wrong: str) -> str:
    rank = dist.get_rank()
    pair, everyone = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    group = {"overlap": everyone if rank == 2 else pair, "settings": None}[wrong]
    with pytest.raises(ConfigError) as caught:
        make(group, preset="ring" if rank < 2 else "ulysses")
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("overlap", r"rank 2 shares its sequences with ranks \[0, 1, 2\], but rank 0 with \[0, 1\]"),
        ("settings", r"ranks 0 and 2 share their sequences, but gave .*ring.* and .*ulysses"),
    ],
)
def test_ranks_that_disagree_all_get_the_error(ranks: Any, wrong: str, text: str) -> None:
    for found in ranks(3).run(run_mistaken_groups, wrong):
        assert re.search(text, found), found


@pytest.mark.parametrize(
    ("hosts", "topology"),
    [
        ("aabb", Topology(2, 2)),
        ("aaaa", Topology(1, 4)),
        ("abab", Topology(4, 1)),
        ("aaab", Topology(4, 1)),
        ("abcd", Topology(4, 1)),
    ],
)
def test_nodes_are_found_by_host_name(hosts: str, topology: Topology) -> None:
    assert find_topology(hosts, None) == topology


@pytest.mark.thorough
def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples/attention.py")], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stderr
    hidden = torch.randn(1, 1000, 12, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.transpose(1, 2) for x in hidden.split([8, 2, 2], dim=2))
    mean = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).mean()
    found = re.findall(r"mean of out: (-?\d\.\d{6}) rows of this rank: 500 of 1000", done.stdout)
    np.testing.assert_allclose([float(x) for x in found], [float(mean)] * 2, atol=2e-6)
