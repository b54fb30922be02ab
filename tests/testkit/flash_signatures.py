"""What FlashAttention's packages take and give, by version, and stand-ins of theirs that compute it on a CPU.

Names, order and defaults are those of the packages' own sources, read in November 2026: flash-attn-4 from its wheels on
PyPI, flash_attn_3 from TORCH_LIBRARY in hopper/flash_api_stable.cpp (PyPI has an empty placeholder of that name),
flash-attn from flash_attn/flash_attn_interface.py. A call that one of them would refuse is refused here.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library  # registers what the compiled part of flash_attn_3 would

from testkit.operator_stand_in import attention, bhsd, gradients, window_bias

FLASH_ATTN_FORWARD = (
    "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
    "return_softmax"
)
FLASH_ATTN_BACKWARD = (
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
    "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
)
FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> "
    "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)
FA4_FORWARD = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, "
    "block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None"
)
FA4_BACKWARD = (
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None"
)
# (signature of forward, number of its results, signature of backward, number of its results)
FA4 = {
    "4.0.0b11": (
        FA4_FORWARD + ", q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None",
        2,
        FA4_BACKWARD + ", block_sparse_tensors=None, dlse=None",
        3,
    ),
    "4.0.0b36": (
        FA4_FORWARD + ", aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False",
        5,
        FA4_BACKWARD + ", aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None",
        3,
    ),
}


def check(given: Any, lse: Tensor | None = None) -> None:
    q = given.q
    assert given.softmax_scale == q.shape[-1] ** -0.5
    assert given.softcap in (None, 0.0)
    if lse is not None:
        assert lse.shape == (1, q.shape[2], q.shape[1])
        assert lse.is_contiguous()
        assert given.dout.is_contiguous()
        assert given.deterministic == torch.are_deterministic_algorithms_enabled()


def forward(given: Any, bias: Tensor) -> tuple[Tensor, Tensor]:
    check(given)
    out, lse = attention(*bhsd(given.q, given.k, given.v), bias)
    return out.transpose(0, 1)[None].to(given.q.dtype), lse[None].to(given.q.dtype)


def backward(given: Any, lse: Tensor, bias: Tensor) -> list[Tensor]:
    check(given, lse)
    found = gradients(*bhsd(given.dout, given.q, given.k, given.v, given.out), lse[0], bias)
    return [x.transpose(0, 1)[None].to(given.q.dtype) for x in found]


def flash2_bias(given: Any) -> Tensor:
    sizes = given.q.shape[1], given.k.shape[1]
    return window_bias(*sizes, given.causal, given.window_size_left, given.window_size_right)


def plain_bias(given: Any, *, causal: bool, none: int | None) -> Tensor:
    """Of FlashAttention-3 and -4: bounds stand for themselves, counted from the bottom right corner."""
    rows, keys = given.q.shape[1], given.k.shape[1]
    left, right = given.window_size_left, given.window_size_right
    assert all(bound == none or bound >= 0 for bound in (left, right)), (left, right)
    right = 0 if causal else right
    distance = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen &= distance <= left if left not in (None, -1) else seen
    seen &= -distance <= right if right not in (None, -1) else seen
    return torch.zeros(rows, keys).masked_fill(~seen, -math.inf)


def named(signature: str, function: Callable[[Any], object]) -> Callable[..., object]:
    """A function of that signature which hands `function` its arguments by name."""
    parameters = inspect.signature(eval(f"lambda {signature}: None"))

    def call(*args: object, **kwargs: object) -> object:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(SimpleNamespace(**bound.arguments))

    return call


def _flash_attn(module: ModuleType, version: str) -> None:
    def run_forward(given: Any) -> tuple[object, ...]:
        assert given.dropout_p == 0.0
        assert given.alibi_slopes is None
        assert given.return_softmax is False
        return *forward(given, flash2_bias(given)), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def run_backward(given: Any) -> Tensor:
        assert given.dropout_p == 0.0
        assert given.alibi_slopes is None
        assert given.rng_state is None
        for target, found in zip(
            (given.dq, given.dk, given.dv), backward(given, given.softmax_lse, flash2_bias(given)), strict=True
        ):
            target.copy_(found)
        return given.softmax_lse

    vars(module)["_flash_attn_forward"] = named(FLASH_ATTN_FORWARD, run_forward)
    vars(module)["_flash_attn_backward"] = named(FLASH_ATTN_BACKWARD, run_backward)


def _flash_attn_4(module: ModuleType, version: str) -> None:
    takes_forward, forward_results, takes_backward, backward_results = FA4[version]

    def run_forward(given: Any) -> tuple[object, ...]:
        assert given.return_lse
        found = forward(given, plain_bias(given, causal=given.causal, none=None))
        return (*found, *[None] * (forward_results - 2))

    def run_backward(given: Any) -> tuple[object, ...]:
        found = backward(given, given.lse, plain_bias(given, causal=given.causal, none=None))
        return (*found, *[None] * (backward_results - 3))

    vars(module)["_flash_attn_fwd"] = named(takes_forward, run_forward)
    vars(module)["_flash_attn_bwd"] = named(takes_backward, run_backward)


@contextmanager
def _operators_of_fa3() -> Iterator[None]:
    def run_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = by_schema("fwd", *args, **kwargs)
        assert given.sm_margin == (torch._C._get_sm_carveout_experimental() or 0)
        found = forward(given, plain_bias(given, causal=given.is_causal, none=-1))
        return *found, torch.empty(0), torch.empty(0)

    def run_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = by_schema("bwd", *args, **kwargs)
        assert given.sm_margin == (torch._C._get_sm_carveout_experimental() or 0)
        found = backward(given, given.softmax_lse, plain_bias(given, causal=given.is_causal, none=-1))
        for target, value in zip((given.dq, given.dk, given.dv), found, strict=True):
            target.copy_(value)
        return given.dq, given.dk, given.dv, *(torch.empty(0) for _ in range(5))

    def by_schema(name: str, *args: object, **kwargs: object) -> SimpleNamespace:
        arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        positional = dict(zip((argument.name for argument in arguments), args, strict=False))
        return SimpleNamespace(**(defaults | positional | kwargs))

    library = Library("flash_attn_3", "DEF")
    try:
        for schema, function in ((FA3_FORWARD, run_forward), (FA3_BACKWARD, run_backward)):
            library.define(schema)
            library.impl(schema.split("(")[0], function, "CPU")
        yield
    finally:
        library._destroy()


# kernel -> (versions, the modules that the package has, what fills the last of them)
PACKAGES: dict[str, tuple[list[str], list[str], Callable[[ModuleType, str], None]]] = {
    "flash_attn": (["2.8.3"], ["flash_attn", "flash_attn.flash_attn_interface"], _flash_attn),
    "fa3": (["3.0.0"], ["flash_attn_interface"], lambda module, version: None),
    "fa4": (list(FA4), ["flash_attn", "flash_attn.cute", "flash_attn.cute.interface"], _flash_attn_4),
}


@contextmanager
def installed(kernel: str, version: str) -> Iterator[None]:
    """Inside the body the package of a kernel can be imported, and computes on a CPU."""
    _, names, fill = PACKAGES[kernel]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
    fill(sys.modules[names[-1]], version)
    try:
        with _operators_of_fa3():
            yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
