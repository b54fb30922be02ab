"""On a GPU: every kernel that can run here equals the reference, forward and backward, and again in the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from testkit.attention_oracle import random_inputs
from torch import Tensor

from engine.attention.merge import backward_stats, surrogate_out
from engine.config.errors import ConfigError
from engine.kernels.attention import KERNELS, select_kernel
from engine.kernels.attention.base import TileGradients, TileKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.visibility.mask import Band, normalise
from engine.training.determinism import deterministic_algorithms

pytestmark = pytest.mark.gpu

NAMES = [name for name, kind in KERNELS.items() if "cuda" in kind.capabilities.devices and name != "reference"]
TILES = {
    "full": Band(0, 384, 0, 384),
    "causal": Band(0, 384, 0, 384, low=0),
    "more keys": Band(0, 200, 0, 700),
    "more queries": Band(0, 700, 0, 200),
    "one query": Band(0, 1, 0, 300),
    "one key": Band(0, 300, 0, 1),
    "window": Band(0, 512, 0, 512, low=0, high=99),
    "window of a later block": Band(0, 300, 0, 700, low=-650, high=20),
    "window of an earlier block": Band(0, 700, 0, 300, low=-10, high=500),
    "more queries than a window's keys": Band(0, 600, 0, 128, low=0, high=400),
    "upper bound, many queries": Band(0, 700, 0, 128, high=300),
}
LIMITS = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # relative norms; bf16 rounds to 0.004, and p too


@dataclass(frozen=True)
class Case:
    """A tile on the GPU with what the reference makes of it, given the lse of more keys than the tile's."""

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band
    grads: TileGradients
    want: tuple[Tensor, ...]  # out, lse, dq, dk, dv


def dtype_of(name: str) -> torch.dtype:
    """What the kernel is there for."""
    return torch.float32 if name == "aten_efficient" else torch.bfloat16


def kernel_of(name: str, head_dim: int, *, deterministic: bool = False) -> TileKernel:
    """The kernel, or a skip with the reason why it is not for this machine or these heads."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        choice = select_kernel(name, device, dtype_of(name), head_dim, deterministic=deterministic)  # type: ignore[arg-type]
    except ConfigError as error:
        pytest.skip(str(error))  # another package or GPU; those of torch itself: see the first test
    return choice.kernel


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="an older GPU")
@pytest.mark.parametrize("name", ["aten_flash", "aten_efficient", "reference"])
def test_kernels_of_torch_itself_are_there_for_every_gpu_since_ampere(name: str) -> None:
    """Else every test of theirs would be skipped, and nobody would know."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert select_kernel(name, device, dtype_of(name), 128).kernel.name == name  # type: ignore[arg-type]


def make_case(tile: Band, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Case:
    band = normalise(tile)[0].from_0()
    queries = random_inputs(band.num_queries, 8, kv_heads, head_dim, dtype)
    others = random_inputs(band.num_keys, 8, kv_heads, head_dim, dtype, seed=1)
    q, dout, k, v = (x.cuda() for x in (queries.q, queries.dout, others.k, others.v))
    out, lse = ReferenceKernel().forward(q, k, v, band)
    row_out, row_lse = 0.6 * out, lse + 0.5
    grads = TileGradients(dout, surrogate_out(dout, backward_stats(dout, row_out, row_lse)), row_lse)
    want = ReferenceKernel().backward(TileGradients(dout, row_out, row_lse), q, k, v, band)
    return Case(q, k, v, band, grads, (out, lse, *want))


def results(kernel: TileKernel, case: Case) -> tuple[Tensor, ...]:
    operands = (case.q, case.k, case.v, case.band)
    return (*kernel.forward(*operands), *kernel.backward(case.grads, *operands))


def assert_near(got: tuple[Tensor, ...], case: Case) -> None:
    limit = LIMITS[case.q.dtype]
    for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, case.want, strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= limit, (name, error.item())


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("name", NAMES)
def test_every_tile_equals_the_reference(name: str, tile: Band) -> None:
    kernel = kernel_of(name, 128)
    case = make_case(tile, 2, 128, dtype_of(name))
    assert_near(results(kernel, case), case)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_of_heads_equals_the_reference(name: str, head_dim: int, kv_heads: int) -> None:
    kernel = kernel_of(name, head_dim)
    for tile in (TILES["causal"], TILES["more keys"], TILES["window"]):
        case = make_case(tile, kv_heads, head_dim, dtype_of(name))
        assert_near(results(kernel, case), case)


@pytest.mark.parametrize("tile", ["full", "causal", "window"])
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_kernels_give_the_same_bits_again(name: str, tile: str) -> None:
    kernel = kernel_of(name, 128, deterministic=True)
    case = make_case(TILES[tile], 2, 128, dtype_of(name))
    with deterministic_algorithms(True):
        first = results(kernel, case)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, results(kernel, case), strict=True))
    assert_near(first, case)


def test_all_kernels_run_one_after_another_in_one_process() -> None:
    case = make_case(TILES["causal"], 2, 128, torch.bfloat16)
    kernels = []
    for name in NAMES:
        try:
            kernels.append(select_kernel(name, case.q.device, torch.bfloat16, 128).kernel)  # type: ignore[arg-type]
        except ConfigError:
            continue
    for kernel in [*kernels, *reversed(kernels)]:
        assert_near(results(kernel, case), case)
    assert len(kernels) >= 2
