"""Which parameters of a model are trained: all, or those of its adapters (`model.lora`). Standard library only.

An adapter of rank r on a matrix [out, in] is r (in + out) parameters (LoRA, arXiv:2106.09685), and `out` more with DoRA
(arXiv:2402.09353). One on the parameters of E experts [E, in, out] has rank r for each. For all linear layers peft 0.21
takes router and experts, too, and rank 2 r where gate and up are one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.config.settings import ModelConfig
from engine.predict.flops import count_parameters, layer_shapes

_ALL_LINEAR = "all-linear"
_GATE_UP = "gate_up_proj"


class _Matrix(NamedTuple):
    """A matrix of the layers by its usual name in transformers. layers: that have it; experts: that are one tensor."""

    name: str
    inputs: int
    outputs: int
    layers: int
    experts: int = 0


def trained_parameters(model: ModelConfig) -> int:
    """Return the number of trained parameters.

    With adapters it is exact where projections are modules of their own, and more than there are where some are one
    module; a target that this engine does not know by name counts as all linear layers.
    """
    lora = model.lora
    if lora.rank is None:
        return count_parameters(model).total
    matrices = list(_matrices(model))
    known = {matrix.name for matrix in matrices}
    names = [target.rpartition(".")[2] for target in lora.target_modules]
    takes_all = _ALL_LINEAR in names or not known.issuperset(names)
    experts = {target.rpartition(".")[2] for target in lora.target_parameters}
    total = 0
    for matrix in matrices:
        if matrix.experts and (takes_all or matrix.name in experts):
            halves = 2 if takes_all and model.gated_ffn and matrix.name == _GATE_UP else 1
            total += matrix.layers * matrix.experts * halves * lora.rank * (matrix.inputs + matrix.outputs)
        elif not matrix.experts and (takes_all or matrix.name in names):
            total += matrix.layers * (lora.rank * (matrix.inputs + matrix.outputs) + lora.dora * matrix.outputs)
    return total


def _matrices(model: ModelConfig) -> Iterator[_Matrix]:
    hidden, moe_layers = model.hidden_size, model.num_moe_layers
    linear = layer_shapes(model).linear
    names = ("in_proj_qkvz", "in_proj_ba", "out_proj") if len(linear) > 2 else ("in_proj", "out_proj")
    for name, shape in zip(names, linear, strict=False):
        yield _Matrix(name, *shape, model.linear_layers.num_layers)
    layers = model.num_layers - model.linear_layers.num_layers
    queries, values = model.num_heads * model.head_dim, model.num_heads * (model.v_head_dim or model.head_dim)
    if model.kv_lora_rank is None:
        yield _Matrix("q_proj", hidden, queries * (1 + model.gated_attention), layers)
        yield _Matrix("k_proj", hidden, model.num_kv_heads * model.head_dim, layers)
        yield _Matrix("v_proj", hidden, model.num_kv_heads * (model.v_head_dim or model.head_dim), layers)
    else:
        rope, rank = model.rope_head_dim or 0, model.kv_lora_rank
        if model.q_lora_rank is None:
            yield _Matrix("q_proj", hidden, queries, layers)
        else:
            yield _Matrix("q_a_proj", hidden, model.q_lora_rank, layers)
            yield _Matrix("q_b_proj", model.q_lora_rank, queries, layers)
        yield _Matrix("kv_a_proj_with_mqa", hidden, rank + rope, layers)
        yield _Matrix("kv_b_proj", rank, queries - model.num_heads * rope + values, layers)
    yield _Matrix("o_proj", values, hidden, layers)
    widths = (model.ffn_hidden_size, model.num_layers - moe_layers), (model.shared_expert_ffn_hidden_size, moe_layers)
    for width, having in widths:
        if width and having:
            if model.gated_ffn:
                yield _Matrix("gate_proj", hidden, width, having)
            yield _Matrix("up_proj", hidden, width, having)
            yield _Matrix("down_proj", width, hidden, having)
    if moe_layers:
        width, experts = model.expert_ffn_hidden_size, model.num_experts
        yield _Matrix("gate", hidden, experts, moe_layers)
        yield _Matrix(_GATE_UP, hidden, (1 + model.gated_ffn) * width, moe_layers, experts)
        yield _Matrix("down_proj", width, hidden, moe_layers, experts)
