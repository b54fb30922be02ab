"""Initial weights: a function of seed, name and row, whatever part of them a rank holds."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from testkit.model_helpers import SHAPES, SMALL, build
from testkit.tiny_training import mesh_of, tiny_config
from torch.distributed.tensor import DTensor

from engine.attention.library import resolve_here
from engine.config.settings import ModelConfig, ParallelConfig
from engine.model.llama import LlamaModel
from engine.parallel.parallelize import build_model

# More than two blocks of 2**20 elements in embedding and head, rows that no world size here divides, and rows whose
# length is no multiple of 16: torch draws the last 16 values of a tensor in another way.
TALL = replace(SMALL, vocab_size=2401, hidden_size=957, num_layers=1)


def test_same_seed_same_weights_other_seed_others() -> None:
    first, again, other = build(SMALL, seed=1), build(SMALL, seed=1), build(SMALL, seed=2)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name)


def test_the_global_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build(SMALL)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert torch.equal(first.head.weight, build(SMALL).head.weight)


def test_spread_is_as_documented() -> None:
    model = build(replace(SMALL, hidden_size=384, vocab_size=500, init_std=0.02))
    residual = 0.02 / math.sqrt(2 * SMALL.num_layers)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        expected = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        # 5 standard errors of a standard deviation of n draws.
        assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel()))
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel())


def test_no_two_blocks_or_parameters_repeat() -> None:
    model = build(TALL)
    heads = [p.flatten()[:50] for n, p in model.named_parameters() if "norm" not in n]
    block_rows = 2**20 // TALL.hidden_size
    heads.append(model.embedding.weight[block_rows:].flatten()[:50])
    assert torch.unique(torch.stack(heads), dim=0).shape[0] == len(heads)


def digests(model: LlamaModel) -> dict[str, str]:
    """A hash of every whole weight, by name."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    wholes = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}
    return {name: hashlib.sha256(w.numpy().tobytes()).hexdigest() for name, w in wholes.items()}


def digests_of_shards(config: ModelConfig, replicas: int) -> dict[str, str]:
    """Digests of an FSDP2 model initialised on its shards."""
    parallel = ParallelConfig(dp_replicate_size=replicas, dp_shard_size=dist.get_world_size() // replicas, cp_size=1)
    run = tiny_config(seed=0, model=config, parallel=parallel)
    mesh = mesh_of(run.parallel, run.cluster)
    model, _ = build_model(resolve_here(run, mesh), mesh)
    assert not config.tie_embeddings or model.head.weight is model.embedding.weight
    return digests(model)


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("config", [TALL, SHAPES["tied"]], ids=["tall", "tied"])
def test_shards_hold_the_weights_of_one_rank(ranks, config, world_size, replicas) -> None:  # type: ignore[no-untyped-def]
    expected = digests(build(config))
    assert ranks(world_size).run(digests_of_shards, config, replicas) == [expected] * world_size
