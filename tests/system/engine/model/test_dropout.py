"""Residual dropout: which numbers go depends on their place alone, evenly, and the same in both directions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from testkit.ranks import Pools
from testkit.tiny_training import TINY_MODEL, own_part, random_batches, start_run, tiny_config

from engine.config.settings import AttentionConfig, MemoryConfig, ParallelConfig, RunConfig
from engine.model.dropout import Dropout, dropped, row_keys
from engine.model.llama import LlamaModel

SEED = 7
M64, M32 = 2**64 - 1, 2**32 - 1


def kept_mask(samples: list[int], positions: torch.Tensor, features: int, rate: float, branch: int) -> torch.Tensor:
    ones = torch.ones(len(samples), positions.numel(), features, dtype=torch.float64)
    return dropped(ones, Dropout(rate, row_keys(SEED, samples, positions)), branch) != 0


def splitmix(value: int, start: bool = True) -> int:
    value = (value + 0x9E3779B97F4A7C15) & M64 if start else value
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & M64
    return value ^ (value >> 31)


def mixed(value: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value = ((value ^ (value >> shift)) * factor) & M32
    return value ^ (value >> 16)


def is_kept(sample: int, position: int, feature: int, rate: float, branch: int) -> bool:
    """The definition, in unsigned integers of any size."""
    key = splitmix(splitmix(splitmix(SEED) ^ sample) ^ position, start=False) & M32
    bits = mixed((mixed(key ^ (splitmix(branch) & M32)) + feature * 0x9E3779B9) & M32)
    return (bits ^ 2**31) >= round(rate * 2**32)


def test_the_mask_is_its_definition() -> None:
    samples, positions = [0, 3, 10**12], torch.tensor([0, 1, 5, 2**20, 4_000_000])
    for rate, branch in itertools.product((0.1, 0.5, 0.9), (0, 1, 63)):
        found = kept_mask(samples, positions, 9, rate, branch)
        for (b, sample), (t, position), f in itertools.product(
            enumerate(samples), enumerate(positions.tolist()), range(9)
        ):
            assert bool(found[b, t, f]) == is_kept(sample, position, f, rate, branch)


def test_dropout_masks_are_independent() -> None:
    def values(samples: list[int], start: int = 0, branch: int = 0) -> torch.Tensor:
        return kept_mask(samples, torch.arange(start, start + 512), 512, 0.5, branch)[0].double() - 0.5

    one = values([0])
    others = [values([1]), values([0], 1), values([0], 512), values([0], 0, 1), values([0], 0, 2), one.roll(1, 1)]
    others += [one.t(), one.roll(7, 0)]
    for other in others:
        correlation = float((one * other).mean() / 0.25)
        assert abs(correlation) < 5 / 512  # of 512 x 512 pairs, in standard deviations


def test_dropout_does_not_depend_on_the_order_of_rows() -> None:
    x = torch.randn(2, 40, 16)
    positions = torch.randperm(1000)[:40]
    whole = dropped(x, Dropout(0.3, row_keys(SEED, [4, 9], positions)), 2)
    order = torch.randperm(40)
    turned = dropped(x[:, order], Dropout(0.3, row_keys(SEED, [4, 9], positions[order])), 2)
    assert torch.equal(turned, whole[:, order])


def test_dropout_of_a_part_is_the_part_of_the_whole() -> None:
    x = torch.randn(2, 40, 16)
    positions = torch.randperm(1000)[:40]
    whole = dropped(x, Dropout(0.3, row_keys(SEED, [4, 9], positions)), 2)
    part = Dropout(0.3, row_keys(SEED, [4, 9], positions)).of(slice(7, 30))
    assert torch.equal(dropped(x[:, 7:30], part, 2), whole[:, 7:30])
    assert torch.equal(dropped(x[1:], Dropout(0.3, row_keys(SEED, [9], positions)), 2), whole[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_dropout_are_scaled_as_its_output(dtype: torch.dtype) -> None:
    x = torch.randn(1, 20, 24, dtype=dtype, requires_grad=True)
    dropout = Dropout(0.25, row_keys(SEED, [0], torch.arange(20)))
    out = dropped(x, dropout, 0)
    mask = kept_mask([0], torch.arange(20), 24, 0.25, 0)
    expected = torch.where(mask, x.detach() / 0.75, 0.0)
    torch.testing.assert_close(out.detach(), expected)
    dout = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close(dx, torch.where(mask, dout / 0.75, 0.0))


@pytest.mark.parametrize("half", [0, 1])
def test_every_branch_of_every_layer_is_dropped_by_itself(half: int) -> None:
    model, tokens, positions = LlamaModel(TINY_MODEL).double(), torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)
    added: list[torch.Tensor] = []
    for layer in model.layers:
        silent = layer.self_attn.o_proj if half else layer.mlp.down_proj
        torch.nn.init.zeros_(silent.weight)
        layer.register_forward_hook(lambda _, given, out: added.append(out - given[0]))
    model(tokens, positions, lambda q, k, v: q, Dropout(0.5, row_keys(SEED, [0], positions)))
    width = TINY_MODEL.hidden_size
    expected = [kept_mask([0], positions, width, 0.5, 2 * index + half) for index in range(TINY_MODEL.num_layers)]
    assert torch.equal(torch.stack(added) != 0, torch.stack(expected))


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (1, {"memory": MemoryConfig(activation_checkpoint="full")}),
    "tiles": (1, {"memory": MemoryConfig(activation_checkpoint="attn_out", tile_tokens=7)}),
    "groups": (1, {"memory": MemoryConfig(activation_checkpoint="attn_out_every", every_layers=2)}),
    "kept on the host": (1, {"memory": MemoryConfig(activation_checkpoint="none", activation_store="host")}),
    "chunks on the host": (1, {"attention": AttentionConfig(preset="fpdt", chunk_tokens=8)}),
    "two sequences at once": (1, {"train": {"micro_batch_size": 2}}),
    "2 burst": (
        2,
        {
            "parallel": ParallelConfig(cp_size=2),
            "attention": AttentionConfig(preset="burst"),
            "memory": MemoryConfig(activation_checkpoint="seq_fraction"),
        },
    ),
    "2 tp": (2, {"parallel": ParallelConfig(tp_size=2, cp_size=1), "attention": AttentionConfig(preset="megatron_tp")}),
    "2 dp": (2, {"parallel": ParallelConfig(dp_shard_size=2, cp_size=1)}),
}
BASE = {"memory": MemoryConfig(activation_checkpoint="none")}


def config_of(way: dict[str, Any], rate: float = 0.2) -> RunConfig:
    train = {"dropout": rate, **way.get("train", {})}
    return tiny_config(**{**BASE, **way, "train": train})


def losses(config: RunConfig, steps: int = 3) -> list[float]:
    """Of steps over global batches of 4 sequences."""
    run = start_run(config)
    micro_steps = 4 // (run.mesh.dp_size * config.train.micro_batch_size)
    return [
        run.train_step(step, own_part(random_batches(step, sequences=4), run.mesh, micro_steps=micro_steps)).loss
        for step in range(steps)
    ]


@pytest.fixture(scope="module")
def expected(ranks: Pools) -> list[float]:
    found: list[float] = ranks(1).run(losses, config_of({}))[0]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_losses_with_dropout_do_not_depend_on_the_ranks(ranks: Pools, expected: list[float], way: str) -> None:
    world_size, changes = WAYS[way]
    for found in ranks(world_size).run(losses, config_of(changes)):
        assert found == pytest.approx(expected, rel=1e-5)
