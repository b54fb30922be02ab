"""The decoder: positions, batches, construction, tied weights."""

from __future__ import annotations

import pytest
import torch
from testkit.model_helpers import SHAPES, SMALL, build, causal_attention, make_tokens, visible_attention

from engine.model.llama import LlamaModel
from engine.model.rope import rope_table
from engine.predict.flops import count_parameters

TOKENS = 24
EXACT = {"rtol": 1e-9, "atol": 1e-9}  # float64; only rotary tables are rounded to fp32, the same ones on both sides


@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_count_by_formula_is_that_of_the_model(shape: str) -> None:
    with torch.device("meta"):
        model = LlamaModel(SHAPES[shape])
    count = count_parameters(SHAPES[shape])
    assert sum(p.numel() for p in model.parameters()) == count.total
    assert (
        count.matmul
        == sum(p.numel() for n, p in model.named_parameters() if n.endswith("proj.weight")) + model.head.weight.numel()
    )


@pytest.mark.parametrize("shape", ["gqa", "tied"])
def test_permuted_rows_with_their_positions_give_the_permuted_result(shape: str) -> None:
    config = SHAPES[shape]
    model = build(config, torch.float64)
    tokens = make_tokens(config, 2, TOKENS)
    positions = torch.arange(TOKENS)
    expected = model(tokens, positions, causal_attention(TOKENS))
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    visible = positions[order][:, None] >= positions[order][None, :]
    permuted = model(tokens[:, order], positions[order], visible_attention(visible))
    torch.testing.assert_close(permuted, expected[:, order], **EXACT)


@pytest.mark.parametrize(
    "change", [lambda m: m.to(torch.float64), lambda m: m.to_empty(device="cpu"), lambda m: m.float()]
)
def test_tied_weights_stay_one_parameter(change) -> None:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        model = LlamaModel(SHAPES["tied"])
    model = change(change(model))
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters() if "head" in name] == []


def test_hidden_has_the_dtype_of_the_weights() -> None:
    model = build(SMALL, torch.bfloat16)
    hidden = model(make_tokens(SMALL, 1, 5), torch.arange(5), causal_attention(5))
    assert hidden.dtype == torch.bfloat16
    assert hidden.shape == (1, 5, SMALL.hidden_size)


# Dynamo itself makes an instance of every autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_layer_compiles_as_one_graph() -> None:
    model = build(SMALL, torch.float64)
    x = torch.randn(1, TOKENS, SMALL.hidden_size, dtype=torch.float64)
    table = rope_table(torch.arange(TOKENS), SMALL.head_dim, SMALL.rope_theta)
    results = []
    for layer in (model.layers[0], torch.compile(model.layers[0], backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, *table, causal_attention(TOKENS))
        out.sum().backward()
        results.append((out.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)  # sums in another order
