"""The stand-in for flash-attn keeps flash-attn's conventions: layouts, bottom-right causal, lse, packed sequences."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SHIM = Path(__file__).resolve().parents[3] / "benchmarks/peers/shim"
HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCALE = WIDTH**-0.5


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, imported under the name of the package and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(SHIM))
    yield importlib.import_module("flash_attn.flash_attn_interface")
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def draw(*rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout; float64, so that the comparison is exact."""
    generator = torch.Generator().manual_seed(0)
    q_rows, k_rows = rows
    shapes = ((q_rows, HEADS), (k_rows, KV_HEADS), (k_rows, KV_HEADS), (q_rows, HEADS))
    q, k, v, dout = (torch.randn(*shape, WIDTH, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v, dout


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """out, lse [heads, rows], dq, dk, dv; the last query sees the last key."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in leaves[1:])
    scores = torch.einsum("ihd,jhd->hij", leaves[0], keys) * SCALE
    if causal:
        visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        scores = scores.masked_fill(~visible, -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, dout)


OPTIONS = (-1, -1, 0.0, None)  # windows, soft cap, ALiBi


@pytest.mark.parametrize(("q_rows", "k_rows", "causal"), [(6, 6, True), (6, 6, False), (4, 9, True), (4, 9, False)])
def test_forward_and_backward_agree_with_dense_attention(
    flash_attn: Any, q_rows: int, k_rows: int, causal: bool
) -> None:
    q, k, v, dout = draw(q_rows, k_rows)
    out, lse, dq, dk, dv = dense(q, k, v, dout, causal=causal)
    near = {"rtol": 1e-12, "atol": 1e-12}
    got_out, got_lse, *_ = flash_attn._flash_attn_forward(
        q[None], k[None], v[None], 0.0, SCALE, causal, *OPTIONS, False
    )
    torch.testing.assert_close(got_out[0], out, **near)
    torch.testing.assert_close(got_lse[0], lse, **near)
    grads = [torch.full_like(x[None], torch.nan) for x in (q, k, v)]
    flash_attn._flash_attn_backward(
        dout[None], q[None], k[None], v[None], got_out, got_lse, *grads, 0.0, SCALE, causal, *OPTIONS, False
    )
    for got, wanted in zip(grads, (dq, dk, dv), strict=True):
        torch.testing.assert_close(got[0], wanted, **near)


def test_packed_sequences_do_not_see_each_other(flash_attn: Any) -> None:
    q, k, v, dout = draw(10, 10)
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    lengths = (ends, ends, 7, 7)
    parts = [dense(q[a:b], k[a:b], v[a:b], dout[a:b], causal=True) for a, b in ((0, 3), (3, 10))]
    out, lse, *_ = flash_attn._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, SCALE, True)
    torch.testing.assert_close(out, torch.cat([part[0] for part in parts]))
    torch.testing.assert_close(lse, torch.cat([part[1] for part in parts], dim=1))
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *lengths, 0.0, SCALE, True, *OPTIONS, False)
    for index, got in enumerate(grads):
        torch.testing.assert_close(got, torch.cat([part[2 + index] for part in parts]))


def test_the_public_function_is_differentiable(flash_attn: Any) -> None:
    q, k, v, dout = draw(5, 5)
    leaves = [x[None].requires_grad_() for x in (q, k, v)]
    out = flash_attn.flash_attn_func(*leaves, causal=True)
    wanted = dense(q, k, v, dout, causal=True)
    torch.testing.assert_close(out[0], wanted[0])
    for got, grad in zip(torch.autograd.grad(out, leaves, dout[None]), wanted[2:], strict=True):
        torch.testing.assert_close(got[0], grad)


@pytest.mark.parametrize(
    "options", [{"window_size": (4, 0)}, {"dropout_p": 0.1}, {"softmax_scale": 1.0}, {"softcap": 1.0}]
)
def test_what_it_cannot_do_is_refused(flash_attn: Any, options: dict[str, Any]) -> None:
    q, k, v, _ = draw(5, 5)
    with pytest.raises(NotImplementedError, match="stand-in"):
        flash_attn.flash_attn_func(q[None], k[None], v[None], **options)
