"""THE table of distributed attention: every pair of what a user can set, proven by counting and by numbers.

A new preset, layout, mask or ring variant is one more value of an axis below; the cases follow by themselves.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from testkit.covering import Case, covering_cases, pairs_of
from testkit.plan_checks import check_plans, windows
from testkit.resolved import method_of
from torch import Tensor

from engine.attention.library import WINDOWED
from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MemoryConfig, ModelConfig, RunConfig, TrainConfig
from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.kernels.attention.padded import PaddedValues
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.blocks import divide_sequence
from engine.planning.methods.layers import attention_layers
from engine.planning.methods.presets import PRESETS
from engine.planning.program.ops import HOST_CHANNELS
from engine.planning.schedules.plan import channels_of, plan_method
from engine.planning.topology import Topology, padded_length

ROWS = 41  # a prime: every group of several ranks has a padded tail
STARTS = (0, 1, 2, 3, 11, 20, 21, 33, 40)  # documents of one token, and some across the edges of every chunk
TOPOLOGIES = {
    f"{nodes}x{local}": Topology(nodes, local)
    for nodes, local in [(1, 1), (1, 2), (1, 3), (2, 2), (1, 5), (5, 1), (2, 3), (3, 2), (2, 4), (4, 2)]
}
MASKS: dict[str, dict[str, object]] = {
    "causal": {},
    "full": {"mask": "full"},
    "short window": {"mask": "window", "window_tokens": 3},
    "long window": {"mask": "window", "window_tokens": 29},
    "sink": {"mask": "sink_window", "window_tokens": 5, "sink_tokens": 2},
    "documents": {"documents": True},
    "window, documents": {"mask": "window", "window_tokens": 7, "documents": True},
    "strided": {"mask": "strided", "block_tokens": 4, "block_stride": 3},
    "vertical slash": {"mask": "vertical_slash", "block_tokens": 5, "slash_blocks": (0, 2)},
}
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "kv": {"backward_circulates": "kv"},
    "q": {"backward_circulates": "q"},
    "reversed": {"backward_order": "reversed", "backward_circulates": "kv"},
    "gathered": {"kv_transport": "all_gather", "backward_circulates": "kv"},
    "tail": {"backward_circulates": "q"},
    "long tail": {"backward_circulates": "kv"},
    "16-bit gradients": {"gradient_wire_dtype": "bfloat16"},
    "host chunks": {"chunk_tokens": 5, "chunk_store": "host", "prefetch_chunks": 0},
    "device chunks": {"chunk_tokens": 3, "chunk_store": "device", "prefetch_chunks": 2},
}
DEFERRED = {"tail": 1, "long tail": 2}  # local tiles, which the method chooses by time
HEADS: dict[str, dict[str, object]] = {
    "default": {},
    "2": {"head_parallel_size": 2},
    "2, context first": {"head_parallel_size": 2, "placement": "context_first"},
    "2, interleaved": {"head_parallel_size": 2, "placement": "interleaved"},
}
KEEPS: dict[str, MemoryConfig] = {
    "all": MemoryConfig(activation_checkpoint="none"),
    "results": MemoryConfig(activation_checkpoint="attn_out"),
    "half": MemoryConfig(activation_checkpoint="seq_fraction", saved_fraction=0.5),
    "nothing": MemoryConfig(activation_checkpoint="full"),
}
KERNELS = {"reference": ReferenceKernel(), "cpu_flash": PaddedValues(CpuFlashKernel())}
HEAD_DIMS = {"8": (8, 8), "24 and 16": (24, 16), "4 and 8": (4, 8)}  # of q and k, and of v and out
SINKS = {"no sinks": 0.0, "learnable sinks": 1.5}  # of every query head: the spread around 0
LAYOUTS = ["contiguous", "zigzag", "striped", "per_document", "balanced", "split_zigzag", "chunk_cyclic"]
AXES = {
    "preset": [name for name in PRESETS if name != "megatron_tp"],  # which is `single` to attention
    "topology": [*TOPOLOGIES],
    "mask": [*MASKS],
    "layout": ["default", *LAYOUTS],
    "variant": [*VARIANTS],
    "heads": [*HEADS],
    "grouping": ["MHA", "GQA", "MQA"],
    "keeps": [*KEEPS],
    "kernel": [*KERNELS],
    "head_dims": [*HEAD_DIMS],
    "sinks": [*SINKS],
}


def config_of(case: Case) -> RunConfig:
    layout = {} if case["layout"] == "default" else {"layout": case["layout"]}
    settings = {**MASKS[case["mask"]], **VARIANTS[case["variant"]], **HEADS[case["heads"]], **layout}
    if PRESETS[case["preset"]].chunked:  # type: ignore[index]
        settings = {"chunk_tokens": 7, **settings}
    heads, kv_heads = head_counts(case)
    return RunConfig(
        model=ModelConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=8),
        attention=AttentionConfig(preset=case["preset"], **settings),  # type: ignore[arg-type]
        memory=KEEPS[case["keeps"]],
        train=TrainConfig(seq_len=ROWS),
    )


def head_counts(case: Case) -> tuple[int, int]:
    size = 2 * TOPOLOGIES[case["topology"]].size
    return size, {"MHA": size, "GQA": size // 2, "MQA": 1}[case["grouping"]]


@cache
def refused(preset: str, topology: str, layout: str, variant: str, heads: str, grouping: str) -> bool:
    """Whether such a configuration is illegal; masks, memory and kernels go with everything."""
    case = {"preset": preset, "topology": topology, "layout": layout, "variant": variant, "heads": heads}
    try:
        method_of(config_of({**case, "grouping": grouping, "mask": "causal", "keeps": "all"}), TOPOLOGIES[topology])
    except ConfigError:
        return True
    return False


def is_legal(case: Case) -> bool:
    qk_dim, v_dim = HEAD_DIMS[case["head_dims"]]
    if v_dim > qk_dim and case["kernel"] == "cpu_flash":
        return False
    return not refused(*(case[axis] for axis in ("preset", "topology", "layout", "variant", "heads", "grouping")))


def learnable_sinks(case: Case) -> Tensor | None:
    spread, (heads, _) = SINKS[case["sinks"]], head_counts(case)
    random = torch.randn(heads, dtype=torch.float64, generator=torch.Generator().manual_seed(heads))
    return spread * random if spread else None


CASES = covering_cases(AXES, is_legal)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(CASES[number].values()))
def test_every_method_equals_dense_attention(number: int) -> None:
    case = CASES[number]
    config, topology = config_of(case), TOPOLOGIES[case["topology"]]
    method = method_of(config, topology)
    method = replace(method, deferred_local_tiles=DEFERRED.get(case["variant"], method.deferred_local_tiles))
    (layer,) = attention_layers(config, method, STARTS if config.attention.documents else ())
    blocks = divide_sequence(layer.method, padded_length(ROWS, topology.size, 1), [layer.mask])
    plans = plan_method(layer.method, layer.mask, blocks, recompute_before=layer.recompute_before)
    check_plans(
        plans,
        layer.mask,
        blocks,
        head_counts(case),
        kernel=KERNELS[case["kernel"]],
        late=number % 2 == 0,
        topology=topology,
        before=layer.recompute_before,
        head_dims=HEAD_DIMS[case["head_dims"]],
        sinks=learnable_sinks(case),
    )
    assert config.attention.mask in WINDOWED or not windows(plans)
    opened = {*channels_of(method), *HOST_CHANNELS}
    for plan in filter(None, (plans.forward, plans.recompute, plans.backward)):
        assert {transfer.channel for rank in plan.ranks.values() for transfer in rank.transfers()} <= opened


RINGS_OF_THEIR_OWN = ["q", "reversed", "gathered", "tail"]
CHUNKS = ["host chunks", "device chunks"]
NEVER_TOGETHER: list[tuple[list[str], list[str]]] = [
    (["single"], [name for name, topology in TOPOLOGIES.items() if topology.size > 2]),  # 2: they divide the heads
    (
        [name for name, topology in TOPOLOGIES.items() if topology.size % 2],
        [name for name in HEADS if name != "default"],
    ),
    (["fpdt", "chunk_cyclic"], RINGS_OF_THEIR_OWN),  # chunks travel a plain ring
    (["megatron_cp", "megatron_hierarchical"], ["q", "gathered", "tail", *CHUNKS, "chunk_cyclic"]),
    (["cpu_flash"], ["4 and 8"]),
    (["megatron_allgather"], ["q", "reversed", "tail", *CHUNKS, "chunk_cyclic"]),
]


def test_every_pair_of_values_occurs_that_is_legal() -> None:
    everything = {
        frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]
    }
    missing = everything - {frozenset(pair) for case in CASES for pair in pairs_of(case)}
    never = {frozenset([x, y]) for some, others in NEVER_TOGETHER for x in some for y in others}
    assert {frozenset(value for _, value in pair) for pair in missing} == never
    assert len(missing) == len(never)
