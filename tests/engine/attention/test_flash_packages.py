"""Without a GPU: calls of FlashAttention's packages are ones that these take, and mean what the reference computes."""

from __future__ import annotations

from pathlib import Path

import flash_signatures
import pytest
import torch
from attention_oracle import random_inputs

from engine.attention.kernels.base import BandSpec, KernelRequest, TileGradients
from engine.attention.kernels.choice import KERNELS, problem_of
from engine.attention.kernels.flash_packages import package_problem
from engine.attention.kernels.reference import ReferenceKernel
from engine.planning.sequence.mask import Band, normalise
from engine.training.determinism import deterministic_algorithms

VERSIONS = [(name, version) for name, (versions, *_) in flash_signatures.PACKAGES.items() for version in versions]
TILES = {
    "full": (9, 9, None, None),
    "causal": (9, 9, 0, None),
    "more keys": (5, 40, None, None),
    "more queries": (40, 5, None, None),
    "one key": (7, 1, None, None),
    "window": (9, 9, 0, 3),
    "window of a later block": (9, 14, -8, -2),
    "lower bound": (12, 7, -2, None),
    "upper bound, many queries": (30, 4, None, 6),
    "more queries than a window's keys": (20, 8, 0, 12),
}
EXACT = 1e-12  # float64


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_forward_and_backward_equal_the_reference(name: str, version: str, kv_heads: int, tile: tuple) -> None:
    """From strided views of one buffer, the lse of more keys than the tile's, and deterministic where asked."""
    (band, *_) = normalise(Band(0, tile[0], 0, tile[1], tile[2], tile[3]))
    queries = random_inputs(band.num_queries, 4, kv_heads, 16)
    keys = random_inputs(band.num_keys, 4, kv_heads, 16, seed=1)
    q, dout = torch.cat([queries.q, queries.dout], dim=1).split([4, 4], dim=1)
    k, v = torch.stack([keys.k, keys.v], dim=1).unbind(1)
    spec = BandSpec(band.low, band.high)
    out, lse = want = ReferenceKernel().forward(q, k, v, spec)
    grads = TileGradients(dout, 0.6 * out, lse + 0.5)
    with flash_signatures.installed(name, version):
        kernel = KERNELS[name]()  # type: ignore[index]
        torch.testing.assert_close(kernel.forward(q, k, v, spec), want, rtol=EXACT, atol=EXACT)
        with deterministic_algorithms(kv_heads == 1):
            got = kernel.backward(grads, q, k, v, spec)
    expected = ReferenceKernel().backward(grads, q, k, v, spec)
    torch.testing.assert_close(tuple(got), tuple(expected), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_a_package_is_needed_and_enough(name: str, version: str) -> None:
    request = KernelRequest("cuda", torch.bfloat16, 128, (9, 0))
    can = KERNELS[name].capabilities  # type: ignore[index]
    assert "is not installed (no module " in (problem_of(can, request) or "")
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
