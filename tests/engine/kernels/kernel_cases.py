"""Sizes at which every kernel is checked: (check, arguments after the device). Small enough for the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_checks as checks

from engine.row_blocks import CPU_BLOCK_ELEMENTS

# Widths: one, odd, one below and above a power of two, and more than the 8192 that registers hold.
CASES: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (checks.check_rms_norm, ("float64", 3, 1)),
    (checks.check_rms_norm, ("float64", 0, 16)),
    (checks.check_rms_norm, ("float32", 1, 7)),
    (checks.check_rms_norm, ("float32", 70, 127)),
    (checks.check_rms_norm, ("bfloat16", 5, 129)),
    (checks.check_rms_norm, ("float64", 3, 4097)),
    (checks.check_rms_norm, ("float32", 2, 9001)),
    (checks.check_partial_sums, (300, 70, 3)),
    (checks.check_partial_sums, (7, 8200, 3)),
    (checks.check_add_rms_norm, ("float64", 2, 3, 5)),
    (checks.check_add_rms_norm, ("float32", 1, 40, 130)),
    (checks.check_add_rms_norm, ("float64", 1, 2, 17000)),
    (checks.check_add_rms_norm, ("bfloat16", 1, 3, 64)),
    (checks.check_swiglu, ("float64", 2, 3, 7)),
    (checks.check_swiglu, ("float32", 1, 1)),
    (checks.check_swiglu, ("float32", 0, 4)),
    (checks.check_swiglu, ("float32", 67, 129)),
    (checks.check_swiglu, ("bfloat16", 3, 127)),
    (checks.check_rope, ("float64", 2, 5, 3, 2)),
    (checks.check_rope, ("float32", 1, 33, 4, 128)),
    (checks.check_rope, ("float32", 2, 0, 2, 8)),
    (checks.check_rope, ("bfloat16", 2, 3, 1, 6)),
    (checks.check_loss, ("float64", 1, 1, 0.0)),
    (checks.check_loss, ("float64", 7, 129, 0.03)),
    (checks.check_loss, ("float32", 9, 8193, 0.0)),
    (checks.check_loss, ("float32", 6, 20001, 0.001)),
    (checks.check_loss, ("bfloat16", 6, 1000, 0.01)),
    (checks.check_loss, ("float32", 0, 5, 0.0)),
    (checks.check_sliced_loss, ("float64", 11, 41, 3)),
    (checks.check_sliced_loss, ("float32", 6, 8200, 2)),
    (checks.check_loss_is_not_finite, ()),
    (checks.check_contests, ()),
    (checks.check_head_with_loss, ("float64", 37, 101, 5)),
    (checks.check_gradient_of_hidden_is_scaled_in_fp32, ()),
    (checks.check_merge, ("float64", "float64", 7, 3, 8)),
    (checks.check_merge, ("float32", "float32", 70, 2, 127)),
    (checks.check_merge, ("bfloat16", "float32", 6, 2, 40)),
    (checks.check_merge, ("float32", "float32", 0, 2, 8)),
    (checks.check_add_kv, ("float64", "float64", "float64", True, 7, 3, 8)),
    (checks.check_add_kv, ("float32", "float32", None, False, 70, 2, 127)),
    (checks.check_add_kv, ("bfloat16", "float32", "bfloat16", True, 6, 2, 40)),
    (checks.check_add_kv, ("bfloat16", "float32", "float32", False, 33, 1, 128)),
    (checks.check_add_kv, ("float32", "float32", None, True, 0, 2, 8)),
    (checks.check_surrogate, ("float64", "float64", 5, 3, 1)),
    (checks.check_surrogate, ("float32", "float32", 70, 2, 96)),
    (checks.check_surrogate, ("bfloat16", "float32", 6, 2, 40)),
]

# Torch works on a CPU in blocks of rows: two blocks and a bit of rows of 96 elements.
ROWS = CPU_BLOCK_ELEMENTS // 48 + 11
ON_CPU = [
    *((check, sizes) for check, sizes in CASES if check not in checks.OF_KERNELS),
    *((checks.check_rms_norm, (dtype, ROWS, 96)) for dtype in ("float64", "bfloat16")),
    *((checks.check_add_rms_norm, (dtype, 1, ROWS, 96)) for dtype in ("float64", "bfloat16")),
    *((checks.check_rope, (dtype, 2, ROWS // 2 + 11, 4, 24)) for dtype in ("float64", "bfloat16")),
]


def name_of(case: Any) -> str:
    """`check_rms_norm` and its sizes as the name of a test."""
    return case.__name__.removeprefix("check_") if callable(case) else "-".join(map(str, case))
