"""8-bit moments on a CPU: codes and updates against torchao's own, bit for bit; memory of an update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

from engine.device.live_tensors import LiveTensorTracker
from engine.optim.host_moments import PART_NUMBERS, HostAdamW8bit, code_tables, nearest_codes

# Numbers of weights: several parts and a rest, one part, no whole blocks (so fp32 moments) in several parts, too few.
SHAPES = [(3, PART_NUMBERS // 2 + 512), (PART_NUMBERS,), (2 * PART_NUMBERS + 77,), (64, 64), (4095,)]


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(6)
    for step in range(steps):
        optimizer.param_groups[0]["lr"].fill_(1e-2 / (step + 1))
        for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
            # Of many magnitudes, and none at all in one step of one weight.
            magnitudes = torch.randn(parameter.shape, generator=generator).mul(4.0).exp2()
            gradient = torch.randn(parameter.shape, generator=generator) * magnitudes
            parameter.grad = None if (step, index) == (1, 2) else gradient
        optimizer.step()


def plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one weight's state, codes and scales by themselves."""
    found = {}
    for name, value in state.items():
        inner = {"codes": value.codes, "scale": value.scale} if hasattr(value, "codes") else {"": value}
        found.update({f"{name} {part}": tensor for part, tensor in inner.items()})
    return found


def test_parts_have_the_bits_of_the_whole() -> None:
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = weights(), weights()
    optimizer, whole = HostAdamW8bit(ours, **settings), AdamW8bit(theirs, **settings)
    train(optimizer)
    with torch.compiler.set_stance("force_eager"):
        train(whole)
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)
        state, wanted = plain(optimizer.state[found]), plain(whole.state[expected])
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    kinds = [len(plain(optimizer.state[parameter])) for parameter in ours]
    assert kinds == [5, 5, 3, 5, 3]  # quantized moments have codes and scales


@pytest.mark.parametrize("parts", [8, 32])
def test_an_update_takes_the_memory_of_some_parts(parts: int) -> None:
    weight = nn.Parameter(torch.zeros(parts, PART_NUMBERS))
    optimizer = HostAdamW8bit([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    there = [weight.detach(), weight.grad, *plain(optimizer.state[weight]).values()]
    with LiveTensorTracker() as tracker:
        tracker.watch(there)
        optimizer.step()
    taken = tracker.peak_bytes - sum(tensor.untyped_storage().nbytes() for tensor in there)
    assert 0 < taken < 16 * 4 * PART_NUMBERS


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_search(signed: bool) -> None:
    """Of every number that stands next to a limit, of numbers of every magnitude, of all numbers of the map."""
    qmap = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31 - 1, (2**21,), generator=generator).int().view(torch.float32)
    _, next_from = code_tables(signed)
    limits = next_from[next_from.isfinite()]
    assert len(limits) == 255
    next_below = torch.nextafter(limits, torch.full_like(limits, -2.0))
    even = torch.linspace(-1, 1, 2**20)
    values = torch.cat([bits[bits.abs() <= 1], even, limits, next_below, qmap, torch.tensor([0.0, -0.0])])
    values = values[values.abs() <= 1]
    assert torch.equal(nearest_codes(values, signed).to(torch.uint8), quantize_8bit_with_qmap(values, qmap))
    assert torch.equal(nearest_codes(limits, signed), torch.arange(1, 256, dtype=torch.int32))
    assert torch.equal(nearest_codes(next_below, signed), torch.arange(255, dtype=torch.int32))
