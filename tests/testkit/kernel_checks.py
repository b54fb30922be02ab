"""What every kernel must give, and torch in its place on a CPU, against float64 formulas written without the engine.

A check takes the device, a dtype's name and the sizes, so that it can run in another process. Tolerances: results are
rounded to their dtype once (a GPU rounds to nearest; the interpreter cuts bf16 off, which is twice as far), what comes
before is fp32 arithmetic, or float64 for float64 tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.elementwise import CONTESTS, TINY
from engine.attention import merge
from engine.config.settings import LossConfig
from engine.device.row_blocks import CPU_BLOCK_ELEMENTS, accumulate_dtype
from engine.loss.fused import linear_cross_entropy, losses_of_logits
from engine.model.elementwise import add_rms_norm, rms_norm, swiglu
from engine.model.rope import apply_rope

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
EPS = 1e-5
ARITHMETIC_ULPS = 64.0  # sums of some thousand terms, fast exponentials and quotients


def draw(device: str, dtype: str, *shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same for every device and, but for rounding, every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype]).to(device)


def strided(x: Tensor) -> Tensor:
    """The same numbers, whose rows lie apart from each other."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def assert_near(got: Tensor, want: Tensor, *, sum_of: int = 1, size: float = 0.0) -> None:
    """`got` is float64 `want`, rounded once; before that, fp32 arithmetic on numbers as large as the largest of want.

    sum_of   so many numbers were added to get one
    size     of the numbers, where they cancel
    """
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.numel():
        return
    eps = torch.finfo(accumulate_dtype(got.dtype)).eps
    scale = max(size, float(want.abs().max()))
    allowed = ARITHMETIC_ULPS * max(1.0, sum_of**0.5 / 16) * eps * scale + torch.finfo(got.dtype).eps * want.abs()
    error = (got.double() - want).abs()
    worst = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), f"{got.flatten()[worst]} instead of {want.flatten()[worst]}, at {worst}"


def leaves(*tensors: Tensor) -> list[Tensor]:
    """Float64 copies to differentiate with respect to."""
    return [x.detach().double().requires_grad_() for x in tensors]


def formula_of_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float64."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def check_rms_norm(device: str, dtype: str, rows: int, width: int) -> None:
    """Values and gradients; input and incoming gradient with gaps between their rows."""
    x = strided(draw(device, dtype, rows, width)).requires_grad_()
    weight = draw(device, dtype, width, seed=1).requires_grad_()
    dout = strided(draw(device, dtype, rows, width, seed=2))
    normed = rms_norm(x, weight, EPS)
    gradients = torch.autograd.grad(normed, (x, weight), dout)
    exact = leaves(x, weight)
    want = formula_of_norm(*exact)
    wanted = torch.autograd.grad(want, exact, dout.double())
    assert_near(normed.detach(), want.detach())
    assert_near(gradients[0], wanted[0], size=size_of_terms(dout, x, weight))
    assert_near(gradients[1], wanted[1], sum_of=rows)


def check_partial_sums(device: str, rows: int, width: int, most_sums: int) -> None:
    """The weight's gradient from programs of several steps each, the last of them with fewer rows or none."""
    from engine.kernels import rms_norm as kernels

    x, dout = (draw(device, "float32", rows, width, seed=seed) for seed in (0, 1))
    weight = draw(device, "float32", width, seed=2)
    _, rstd = kernels.forward(x, None, weight, EPS)
    dx, dweight = kernels.backward(dout, None, x, weight, rstd, most_sums=most_sums)
    exact = leaves(x, weight)
    wanted = torch.autograd.grad(formula_of_norm(*exact), exact, dout.double())
    assert_near(dx, wanted[0])
    assert_near(dweight, wanted[1], sum_of=rows)


@torch.no_grad()
def size_of_terms(dout: Tensor, x: Tensor, weight: Tensor) -> float:
    """Of the norm's gradient, which is a difference: nothing remains of it in rows of one column."""
    terms = dout.double() * weight.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    return float(terms.abs().max()) if terms.numel() else 0.0


def check_add_rms_norm(device: str, dtype: str, batch: int, tokens: int, width: int) -> None:
    """The sum lies in the branch's memory; gradients of both ways, of each alone, and of none of the other."""
    branch = draw(device, dtype, batch, tokens, width)
    residual = draw(device, dtype, batch, tokens + 2, width, seed=1)[:, 1:-1].requires_grad_()  # rows of a tile
    weight = draw(device, dtype, width, seed=2).requires_grad_()
    dtotal, dnormed = (draw(device, dtype, batch, tokens, width, seed=seed) for seed in (3, 4))
    start = branch.clone().requires_grad_()
    ours = start * 1.0  # no leaf, and the product's backward does not need it
    total, normed = add_rms_norm(ours, residual, weight, EPS)
    assert total.data_ptr() == ours.data_ptr()
    exact = leaves(branch, residual, weight)
    # The sum is rounded before it is normed, as a separate addition rounds it.
    rounding = total.detach().double() - (exact[0] + exact[1]).detach()
    want_total = exact[0] + exact[1] + rounding
    assert_near(total.detach(), (exact[0] + exact[1]).detach())
    want_normed = formula_of_norm(want_total, exact[2])
    assert_near(normed.detach(), want_normed.detach())
    for flows in ((dtotal, dnormed), (None, dnormed), (dtotal, None)):
        pairs = [
            (mine, exactly, flow)
            for mine, exactly, flow in zip((total, normed), (want_total, want_normed), flows, strict=True)
            if flow is not None
        ]
        inputs = (start, residual, weight)
        got = torch.autograd.grad(
            [pair[0] for pair in pairs], inputs, [pair[2] for pair in pairs], retain_graph=True, allow_unused=True
        )
        wanted = torch.autograd.grad(
            [pair[1] for pair in pairs],
            exact,
            [pair[2].double() for pair in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        size = size_of_terms(dnormed, total, weight)
        for mine, reference, terms in zip(got, wanted, (1, 1, batch * tokens), strict=True):
            assert (mine is None) == (reference is None)
            if mine is not None:
                assert_near(mine, reference, sum_of=terms, size=size)


def check_swiglu(device: str, dtype: str, *shape: int) -> None:
    """Values and gradients, also where the sigmoid under- and overflows; the incoming gradient is transposed."""
    gate, up = (draw(device, dtype, *shape, seed=seed) for seed in (0, 1))
    if gate.numel() > 3:
        gate.view(-1)[:3] = torch.tensor([300.0, -300.0, 0.0])
    dout = draw(device, dtype, *reversed(shape), seed=2).permute(*reversed(range(len(shape))))
    inputs = (gate.requires_grad_(), up.requires_grad_())
    out = swiglu(*inputs)
    gradients = torch.autograd.grad(out, inputs, dout)
    exact = leaves(gate, up)
    want = exact[0] * torch.sigmoid(exact[0]) * exact[1]
    wanted = torch.autograd.grad(want, exact, dout.double())
    for got, reference in zip((out.detach(), *gradients), (want.detach(), *wanted), strict=True):
        assert_near(got, reference)


def check_rope(device: str, dtype: str, batch: int, tokens: int, heads: int, head_dim: int) -> None:
    """Values and gradients; the input's heads and the incoming gradient's tokens have gaps between them."""
    x = strided(draw(device, dtype, batch, tokens, heads, head_dim)).requires_grad_()
    dout = draw(device, dtype, batch, heads, tokens, head_dim, seed=1).transpose(1, 2)
    angles = draw(device, "float32", tokens, head_dim // 2, seed=2) * 50
    cos, sin = angles.cos(), angles.sin()
    out = apply_rope(x, cos, sin)
    assert out.is_contiguous()
    (dx,) = torch.autograd.grad(out, x, dout)
    (exact,) = leaves(x)
    turned = (
        torch.view_as_complex(torch.stack(exact.chunk(2, -1), -1)) * torch.complex(cos.double(), sin.double())[:, None]
    )
    want = torch.cat((turned.real, turned.imag), -1)
    (wanted,) = torch.autograd.grad(want, exact, dout.double())
    assert_near(out.detach(), want.detach())
    assert_near(dx, wanted)


def formula_of_loss(logits: Tensor, labels: Tensor, options: LossConfig) -> Tensor:
    """Loss of every row in float64."""
    lse = torch.logsumexp(logits, -1)
    counted = labels != -100
    picked = logits.gather(1, labels.where(counted, 0).unsqueeze(1)).squeeze(1)
    return torch.where(counted, lse - picked + options.z_loss * lse * lse, 0.0)


def chunk_of_logits(device: str, dtype: str, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] with gaps between rows, and labels, some of them ignored, some at either end.

    The first rows have logits of 1e4, impossible tokens, whole stretches of them, and equal logits.
    """
    logits = strided(draw(device, dtype, rows, vocab) * 3)
    labels = torch.arange(rows, device=device) * 7919 % vocab
    labels[::5] = -100
    if rows > 4 and vocab > 4:
        logits[1] *= 1e4
        logits[2, ::2] = -torch.inf
        logits[3, : vocab - 2] = -torch.inf
        logits[4] = 5.0
        labels[1:5] = torch.tensor([0, 1, vocab - 1, vocab // 2])
        if labels[2] % 2 == 0:
            logits[2, labels[2]] = 1.0
    return logits, labels


def check_loss(device: str, dtype: str, rows: int, vocab: int, z_loss: float) -> None:
    """Losses and the gradient in place of the logits; without a gradient the logits stay as they are."""
    options = LossConfig(z_loss=z_loss)
    logits, labels = chunk_of_logits(device, dtype, rows, vocab)
    (exact,) = leaves(logits.clone())
    want = formula_of_loss(exact, labels, options)
    (gradient,) = torch.autograd.grad(want.sum(), exact)
    before = logits.clone()
    alone = losses_of_logits(logits, labels, options, overwrite=False)
    assert torch.equal(logits, before)
    losses = losses_of_logits(logits, labels, options, overwrite=True)
    assert torch.equal(losses, alone)
    assert losses.dtype == accumulate_dtype(logits.dtype)
    for row in range(rows) if rows < 20 else [slice(None)]:  # each by its own size: one of them is 1e4
        assert_near(losses[row].reshape(-1), want[row].detach().reshape(-1))
        assert_near(logits[row], gradient[row])


def check_sliced_loss(device: str, dtype: str, rows: int, vocab: int, ranks: int) -> None:
    """Statistics of slices of the vocabulary give the whole lse, and every slice its part of the gradient."""
    from engine.kernels import cross_entropy

    options = LossConfig(z_loss=0.01)
    logits, labels = chunk_of_logits(device, dtype, rows, vocab * ranks)
    (exact,) = leaves(logits.clone())
    want = formula_of_loss(exact, labels, options)
    (gradient,) = torch.autograd.grad(want.sum(), exact)
    parts = [logits[:, rank * vocab : (rank + 1) * vocab] for rank in range(ranks)]
    found = [cross_entropy.statistics(part, labels, rank * vocab) for rank, part in enumerate(parts)]
    top, total, picked = torch.stack(found).double().unbind(1)
    lse = torch.logsumexp(top + total.log(), 0)
    counted = labels != -100
    losses = torch.where(counted, lse - picked.amax(0) + options.z_loss * lse * lse, 0.0)
    for row in range(rows):
        assert_near(losses[row].to(found[0].dtype).reshape(1), want[row].detach().reshape(1))
    for rank, part in enumerate(parts):
        cross_entropy.overwrite_with_gradient(part, labels, lse.to(found[0].dtype), rank * vocab, options.z_loss)
    for row in range(rows):
        assert_near(logits[row], gradient[row])


def check_loss_is_not_finite(device: str) -> None:
    """A logit that is nan or inf, and a label outside of the vocabulary, show in the loss of their rows alone."""
    logits = draw(device, "float32", 6, 300)
    labels = torch.tensor([3, 3, 300, -1, 299, -100], device=device)
    logits[0, 200], logits[1, 7], logits[5, 0] = torch.nan, torch.inf, torch.nan
    losses = losses_of_logits(logits, labels, LossConfig(), overwrite=True)
    assert losses.isfinite().tolist() == [False, False, False, False, True, True]
    assert losses[5] == 0
    assert not logits[5].any()


def check_head_with_loss(device: str, dtype: str, rows: int, vocab: int, size: int) -> None:
    """The fused loss as a whole, over several chunks, in float64: value and both gradients."""
    options = LossConfig(chunk_tokens=max(1, rows // 3), z_loss=0.02)
    hidden = draw(device, dtype, rows, size).requires_grad_()
    weight = draw(device, dtype, vocab, size, seed=1).requires_grad_()
    labels = torch.arange(rows, device=device) * 31 % vocab
    labels[::4] = -100
    loss = linear_cross_entropy(hidden, weight, labels, options=options)
    gradients = torch.autograd.grad(loss / 7, (hidden, weight))
    exact = leaves(hidden, weight)
    want = formula_of_loss(exact[0] @ exact[1].T, labels, options).sum()
    wanted = torch.autograd.grad(want / 7, exact)
    torch.testing.assert_close(loss.detach().double(), want.detach(), rtol=1e-10, atol=1e-10)
    for got, reference in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), reference, rtol=1e-10, atol=1e-10)


def check_gradient_of_hidden_is_scaled_in_fp32(device: str) -> None:
    """Neither the scalar nor the product is rounded to bf16 but the result."""
    hidden, weight = draw(device, "bfloat16", 6, 64).requires_grad_(), draw(device, "bfloat16", 40, 64, seed=1)
    labels, scale = torch.arange(6, device=device), torch.tensor(1 / 7, device=device)
    alone, scaled = (
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, options=LossConfig()) * factor, hidden)[0]
        for factor in (torch.ones_like(scale), scale)
    )
    assert torch.equal(scaled, (alone.float() * scale).bfloat16())


def check_merge(device: str, dtype: str, wide: str, rows: int, heads: int, head_dim: int) -> None:
    """The mean weighted by sums of exponentials; rows that either side, or neither, has seen keys for."""
    out, lse = strided(draw(device, wide, rows, heads, head_dim)), draw(device, wide, rows, heads, seed=1) * 4
    block = draw(device, dtype, heads, rows, head_dim, seed=2).transpose(0, 1)
    block_lse = (draw(device, wide, heads, rows, seed=3) * 4).T
    lse[::3], out[::3] = -torch.inf, 0.0
    block_lse[::2] = -torch.inf
    old, new = lse.double().exp(), block_lse.double().exp()
    total = old + new
    share = torch.where(total > 0, new / total, 0.0)[..., None]
    want = out.double() + share * (block.double() - out.double())
    want_lse = total.log()
    merge.merge_tile(out, lse, block, block_lse)
    assert_near(out, want)
    is_seen = want_lse > -torch.inf
    assert torch.equal(lse == -torch.inf, ~is_seen)  # neither less nor nan
    assert_near(lse[is_seen], want_lse[is_seen])


def check_add_kv(device: str, dtype: str, wide: str, wire: str | None, stores: bool, *sizes: int) -> None:
    """Sums of k and v, heads as wide as each has them; nothing is read of those that hold nothing yet, nor written
    beside them.
    """
    rows, heads, *widths = sizes
    widths = dict(zip(("dk", "dv"), widths, strict=True))
    room = {name: draw(device, wide, rows, heads + 1, width) for name, width in widths.items()}
    sums = {name: x[:, :heads] for name, x in room.items()}
    beside = {name: x[:, heads:].clone() for name, x in room.items()}
    gradients = {
        "dk": draw(device, dtype, heads, rows, widths["dk"], seed=1).transpose(0, 1),
        "dv": strided(draw(device, dtype, rows, heads, widths["dv"], seed=2)),
    }
    arrived = None
    if wire is not None:
        arrived = {name: draw(device, wire, rows, heads, width, seed=3) for name, width in widths.items()}
    want = {name: x.double() + (0.0 if arrived is None else arrived[name].double()) for name, x in gradients.items()}
    for name, total in sums.items():
        want[name] += 0.0 if stores else total.double()
        if stores:
            total.fill_(torch.nan)
    merge.add_kv(sums, gradients, arrived, stores=stores)
    for name, total in sums.items():
        assert_near(total, want[name])
        assert torch.equal(room[name][:, heads:], beside[name]), name


def check_surrogate(device: str, dtype: str, wide: str, rows: int, heads: int, head_dim: int) -> None:
    """dout * scale has the rowsum of out with dout; rows of zeros stay zeros."""
    dout = draw(device, dtype, heads, rows, head_dim).transpose(0, 1)
    out, lse = strided(draw(device, dtype, rows, heads, head_dim, seed=1)), draw(device, wide, rows, heads, seed=2)
    dout[rows // 2] = 0.0
    delta, norm = (dout.double() * out.double()).sum(-1), dout.double().square().sum(-1)
    want = torch.where(norm > 0, delta / norm.where(norm > 0, 1.0), 0.0)
    stats = merge.backward_stats(dout, out, lse)
    assert torch.equal(stats[..., 0], lse)
    assert_near(stats[..., 1], want)
    stand_in = merge.surrogate_out(dout, stats)
    assert stand_in.dtype == dout.dtype
    assert_near(stand_in, dout.double() * stats[..., 1:].double())


def check_contests(device: str) -> None:
    """The two sides of every benchmark do the same, on the same inputs."""
    for build in CONTESTS:
        ours, theirs = ([], [])
        for side, results in (("ours", ours), ("torch", theirs)):
            torch.manual_seed(0)
            results += [(c.name, getattr(c, side)()) for c in build(TINY, torch.device(device))]
        for (name, mine), (_, reference) in zip(ours, theirs, strict=True):
            if mine is not None and name != "cross_entropy with gradient":  # which leave their results in an input
                torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5, check_dtype=False)


# What torch in place of a kernel need not do: nothing of its interface, and of uncounted rows no gradient of nan.
OF_KERNELS = (check_partial_sums, check_sliced_loss, check_loss_is_not_finite, check_contests)

# Sizes at which every kernel is checked: (check, arguments after the device), small enough for the interpreter.
# Widths: one, odd, one below and above a power of two, and more than the 8192 that registers hold.
CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (check_rms_norm, ("float64", 3, 1)),
    (check_rms_norm, ("float64", 0, 16)),
    (check_rms_norm, ("float32", 1, 7)),
    (check_rms_norm, ("float32", 70, 127)),
    (check_rms_norm, ("bfloat16", 5, 129)),
    (check_rms_norm, ("float64", 3, 4097)),
    (check_rms_norm, ("float32", 2, 9001)),
    (check_partial_sums, (300, 70, 3)),
    (check_partial_sums, (7, 8200, 3)),
    (check_add_rms_norm, ("float64", 2, 3, 5)),
    (check_add_rms_norm, ("float32", 1, 40, 130)),
    (check_add_rms_norm, ("float64", 1, 2, 17000)),
    (check_add_rms_norm, ("bfloat16", 1, 3, 64)),
    (check_swiglu, ("float64", 2, 3, 7)),
    (check_swiglu, ("float32", 1, 1)),
    (check_swiglu, ("float32", 0, 4)),
    (check_swiglu, ("float32", 67, 129)),
    (check_swiglu, ("bfloat16", 3, 127)),
    (check_rope, ("float64", 2, 5, 3, 2)),
    (check_rope, ("float32", 1, 33, 4, 128)),
    (check_rope, ("float32", 2, 0, 2, 8)),
    (check_rope, ("bfloat16", 2, 3, 1, 6)),
    (check_loss, ("float64", 1, 1, 0.0)),
    (check_loss, ("float64", 7, 129, 0.03)),
    (check_loss, ("float32", 9, 8193, 0.0)),
    (check_loss, ("float32", 6, 20001, 0.001)),
    (check_loss, ("bfloat16", 6, 1000, 0.01)),
    (check_loss, ("float32", 0, 5, 0.0)),
    (check_sliced_loss, ("float64", 11, 41, 3)),
    (check_sliced_loss, ("float32", 6, 8200, 2)),
    (check_loss_is_not_finite, ()),
    (check_contests, ()),
    (check_head_with_loss, ("float64", 37, 101, 5)),
    (check_gradient_of_hidden_is_scaled_in_fp32, ()),
    (check_merge, ("float64", "float64", 7, 3, 8)),
    (check_merge, ("float32", "float32", 70, 2, 127)),
    (check_merge, ("bfloat16", "float32", 6, 2, 40)),
    (check_merge, ("float32", "float32", 0, 2, 8)),
    (check_add_kv, ("float64", "float64", "float64", True, 7, 3, 8, 8)),
    (check_add_kv, ("float32", "float32", None, False, 70, 2, 127, 40)),
    (check_add_kv, ("bfloat16", "float32", "bfloat16", True, 6, 2, 24, 40)),
    (check_add_kv, ("bfloat16", "float32", "float32", False, 33, 1, 128, 128)),
    (check_add_kv, ("float32", "float32", None, True, 0, 2, 8, 8)),
    (check_surrogate, ("float64", "float64", 5, 3, 1)),
    (check_surrogate, ("float32", "float32", 70, 2, 96)),
    (check_surrogate, ("bfloat16", "float32", 6, 2, 40)),
]

# Torch works on a CPU in blocks of rows: two blocks and a bit of rows of 96 elements.
ROWS = CPU_BLOCK_ELEMENTS // 48 + 11
ON_CPU = [
    *((check, sizes) for check, sizes in CASES if check not in OF_KERNELS),
    *((check_rms_norm, (dtype, ROWS, 96)) for dtype in ("float64", "bfloat16")),
    *((check_add_rms_norm, (dtype, 1, ROWS, 96)) for dtype in ("float64", "bfloat16")),
    *((check_rope, (dtype, 2, ROWS // 2 + 11, 4, 24)) for dtype in ("float64", "bfloat16")),
]


def name_of(case: Any) -> str:
    """`check_rms_norm` and its sizes as the name of a test."""
    return case.__name__.removeprefix("check_") if callable(case) else "-".join(map(str, case))
