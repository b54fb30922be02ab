"""Every kernel is compiled for a Hopper GPU, which needs no GPU: what Triton's interpreter does not check."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from engine.kernels import cross_entropy, elementwise, merge, rms_norm  # noqa: E402
from engine.kernels.tiles import CELLS, RowTiles  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
# Arguments in fp32 (float64 for float64 tensors) and in int64; the other tensors have the activations' dtype.
WIDE = {
    "rstd",
    "partial",
    "found",
    "lse",
    "cos",
    "sin",
    "scale",
    "block_lse",
    "stats",
    "k_sums",
    "v_sums",
    "k_arrived",
    "v_arrived",
}
NUMBERS = re.compile(r"(_row|_part|_head|_batch|_token)$|^(rows|pairs|heads|tokens|count|first)$")

CHUNK = {"vocab": 128256, "width": 8192, "blocks": 16, "ignore_index": -100}
HEADS = {"head_dim": 128, "width": 128, "per_program": 32}
ADD_KV = {"qk_dim": 128, "v_dim": 128, "width": 128, "per_program": 32}
KERNELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "statistics": (cross_entropy.statistics_kernel, CHUNK, 8),
    "gradient": (cross_entropy.gradient_kernel, {**CHUNK, "z_loss": 1e-4}, 8),
    "swiglu": (elementwise.swiglu_kernel, {"width": CELLS}, 8),
    "swiglu backward": (elementwise.swiglu_backward_kernel, {"width": CELLS}, 8),
    "rotate": (elementwise.rotate_kernel, {"half": 64, "width": 64, "per_program": 64, "direction": 1}, 16),
    "merge": (merge.merge_kernel, HEADS, 8),
    "add kv": (merge.add_kv_kernel, {**ADD_KV, "stores": False, "arrives": True}, 8),
    "stats": (merge.stats_kernel, HEADS, 8),
    "surrogate": (merge.surrogate_kernel, HEADS, 8),
}
for columns in (128, 4096, 8192, 16384):
    tiles = RowTiles(2**20, columns)
    warps = max(4, min(16, tiles.cells // 512))
    forward = {**tiles.constants, "eps": 1e-5, "adds": columns != 128}
    backward = {**tiles.constants, "steps": tiles.steps, "adds": columns != 128}
    KERNELS[f"norm {columns}"] = (rms_norm.forward_kernel, forward, warps)
    KERNELS[f"norm backward {columns}"] = (rms_norm.backward_kernel, backward, max(4, warps // 2))


def compiled(kernel: Any, constants: dict[str, Any], warps: int, element: str) -> Any:
    """The kernel for tensors of `element`, whose addresses, strides and sizes are multiples of 16."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if NUMBERS.search(name):
            return "i32"
        if name == "labels":
            return "*i64"
        is_wide = name in WIDE or (kernel is merge.merge_kernel and name == "out")
        return "*fp64" if element == "fp64" else ("*fp32" if is_wide else f"*{element}")

    signature = {name: kind(name) for name in kernel.arg_names}
    numbers = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n not in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=numbers, attrs=aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, "enable_fp_fusion": True})


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory per thread: registers that were spilled."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", usage)
    return int(found)


@pytest.fixture(scope="module", params=KERNELS)
def bf16_kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Every kernel, compiled for bf16 tensors."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield compiled(*KERNELS[request.param], "bf16")


def test_kernels_load_16_bytes_per_instruction(bf16_kernel: Any) -> None:
    assert "ld.global.v4.b32" in bf16_kernel.asm["ptx"]


def test_kernels_round_to_nearest(bf16_kernel: Any) -> None:
    casts = set(re.findall(r"cvt(?:\.\w+)*\.bf16\w*\.f32", bf16_kernel.asm["ptx"]))
    assert all(cast.startswith("cvt.rn.") for cast in casts), casts


def test_kernels_spill_no_registers(bf16_kernel: Any, tmp_path: Path) -> None:
    assert stack_bytes(bf16_kernel.asm["cubin"], tmp_path) == 0


def test_no_thread_writes_an_lse_that_another_still_has_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merging overwrites lse, each of which several warps read: one store, behind a barrier behind all loads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    ptx = compiled(*KERNELS["merge"], "bf16").asm["ptx"]
    order = "".join(re.findall(r"ld\.global|st\.global|bar(?=\.sync)", ptx))
    *_, stores = re.sub(r"ld\.global", "L", order).replace("st.global", "S").split("bar")
    assert stores == "S"


@pytest.mark.parametrize(
    "name", ["gradient", "statistics", "swiglu backward", "rotate", "merge", "add kv", "norm backward 4096"]
)
def test_kernels_compile_for_float64(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert compiled(*KERNELS[name], "fp64").asm["cubin"]
