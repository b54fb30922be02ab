"""Without a GPU: kernels call torch's operators and FlashAttention's packages by their contracts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from testkit import flash_signatures, operator_stand_in
from testkit.attention_oracle import random_inputs

from engine.config.settings import KernelName
from engine.kernels.attention.base import KernelRequest, TileGradients
from engine.kernels.attention.choice import KERNELS, problem_of
from engine.kernels.attention.flash_packages import package_problem
from engine.kernels.attention.padded import build_kernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.visibility.mask import Band, normalise
from engine.training.determinism import deterministic_algorithms

PACKAGES = [(name, version) for name, (versions, *_) in flash_signatures.PACKAGES.items() for version in versions]
# A kernel, what stands in for its library on a CPU, and the numbers that this computes with.
LIBRARIES: dict[str, tuple[str, Callable[[], AbstractContextManager[None]], torch.dtype]] = {
    **{
        name: (name, operator_stand_in.on_cpu, torch.float32) for name in ("aten_flash", "aten_cudnn", "aten_efficient")
    },
    **{f"{one[0]} {one[1]}": (one[0], partial(flash_signatures.installed, *one), torch.float64) for one in PACKAGES},
}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
TILES = {
    "full": Band(0, 9, 0, 9),
    "causal": Band(0, 9, 0, 9, low=0),
    "more keys": Band(0, 5, 0, 40),
    "more queries": Band(0, 40, 0, 5),
    "one key": Band(0, 7, 0, 1),
    "one query": Band(0, 1, 0, 7),
    "window": Band(0, 9, 0, 9, low=0, high=3),
    "window of a later block": Band(0, 9, 0, 14, low=-8, high=-2),
    "lower bound": Band(0, 12, 0, 7, low=-2),
    "upper bound": Band(0, 7, 0, 12, high=3),
    "more queries than a window's keys": Band(0, 20, 0, 8, low=0, high=12),
    "upper bound, many queries": Band(0, 30, 0, 4, high=6),
    "several strips": Band(0, 1100, 0, 30, high=1090),
}


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("library", LIBRARIES)
def test_library_kernels_equal_the_reference(library: str, kv_heads: int, tile: Band) -> None:
    """From strided views of one buffer, the lse of more keys than the tile's, and deterministic where asked."""
    name, stand_in, dtype = LIBRARIES[library]
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for band in [found.from_0() for found in normalise(tile)]:
        queries = random_inputs(band.num_queries, 4, kv_heads, 16, dtype)
        keys = random_inputs(band.num_keys, 4, kv_heads, 16, dtype, seed=1)
        q, dout = torch.cat([queries.q, queries.dout], dim=1).split([4, 4], dim=1)
        k, v = torch.stack([keys.k, keys.v], dim=1).unbind(1)
        out, lse = want = ReferenceKernel().forward(q, k, v, band)
        spread = torch.stack([0.6 * out, out], dim=2)[:, :, 0]
        grads = TileGradients(dout, spread, lse + 0.5)
        expected = ReferenceKernel().backward(grads, q, k, v, band)
        with stand_in():
            kernel = KERNELS[name]()  # type: ignore[index]
            torch.testing.assert_close(kernel.forward(q, k, v, band), want, **tolerance)
            with deterministic_algorithms(kv_heads == 1):
                got = kernel.backward(grads, q, k, v, band)
        torch.testing.assert_close(tuple(got), tuple(expected), **tolerance)


NARROWER_VALUES = [(name, 24, 16) for name in KERNELS if name not in flash_signatures.PACKAGES]
WIDER_VALUES = [(name, 8, 16) for name, kind in KERNELS.items() if kind.capabilities.unequal_head_dims]


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("name", "qk_dim", "v_dim"), [*NARROWER_VALUES, *WIDER_VALUES])
def test_heads_of_v_may_have_another_width(name: KernelName, tile: Band, qk_dim: int, v_dim: int) -> None:
    for band in [found.from_0() for found in normalise(tile)]:
        queries = random_inputs(band.num_queries, 4, 2, qk_dim, torch.float32, v_dim=v_dim)
        keys = random_inputs(band.num_keys, 4, 2, qk_dim, torch.float32, seed=1, v_dim=v_dim)
        tile_inputs = (queries.q, keys.k, keys.v, band)
        out, lse = want = ReferenceKernel().forward(*tile_inputs)
        grads = TileGradients(queries.dout, 0.6 * out, lse + 0.5)
        with operator_stand_in.on_cpu():
            request = KernelRequest("cpu", torch.float32, qk_dim, v_dim=v_dim)
            kernel = build_kernel(KERNELS[name], request)
            torch.testing.assert_close(kernel.forward(*tile_inputs), want, rtol=2e-5, atol=2e-5)
            got = kernel.backward(grads, *tile_inputs)
        expected = ReferenceKernel().backward(grads, *tile_inputs)
        torch.testing.assert_close(tuple(got), tuple(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "version"), PACKAGES)
def test_a_missing_package_is_named(name: str, version: str) -> None:
    request = KernelRequest("cuda", torch.bfloat16, 128, (9, 0))
    can = KERNELS[name].capabilities  # type: ignore[index]
    assert "is not installed (no module " in (problem_of(can, request) or "")


@pytest.mark.parametrize(("name", "version"), PACKAGES)
def test_an_installed_package_is_sufficient(name: str, version: str) -> None:
    request = KernelRequest("cuda", torch.bfloat16, 128, (9, 0))
    can = KERNELS[name].capabilities  # type: ignore[index]
    with flash_signatures.installed(name, version):
        assert problem_of(can, request) is None


def test_a_package_that_cannot_be_loaded_is_a_reason_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_flash.py").write_text("raise RuntimeError('undefined symbol: _ZN3c10')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    problem = package_problem("broken_flash", "a package")
    assert problem == "a package is installed, but cannot be loaded (RuntimeError: undefined symbol: _ZN3c10)"
    assert package_problem("json.flash", "a package") == "a package is not installed (no module json.flash)"
