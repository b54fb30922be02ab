"""The kernel of a run follows from what is asked, what kernels declare and a trial; every other one has its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit import ROOT
from torch import Tensor

from engine.config.errors import ConfigError
from engine.config.settings import KernelName
from engine.kernels.attention import select_kernel
from engine.kernels.attention.base import KernelRequest, TileGradients, TileKernel, TileResult, no_problem
from engine.kernels.attention.choice import KERNELS, KernelChoice, choose, preference, problem_of
from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.kernels.attention.trial import trial_problem
from engine.planning.visibility.mask import Band

BF16, FP32 = torch.bfloat16, torch.float32
AMPERE, ADA, HOPPER, BLACKWELL, TURING = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5)


def ask(capability: tuple[int, int] | None, dtype: torch.dtype = BF16, head_dim: int = 128, **rest) -> KernelRequest:
    return KernelRequest("cuda", dtype, head_dim, capability, **rest)


def chosen(request: KernelRequest, name: str = "auto") -> KernelChoice:
    return choose(name, request, lambda kind: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "order"),
    [
        (ask(HOPPER), ["fa4", "aten_cudnn", "fa3", "aten_flash", "flash_attn"]),
        (ask(HOPPER, windows=True), ["fa4", "fa3", "aten_cudnn", "aten_flash", "flash_attn"]),
        (ask(HOPPER, documents=True), ["fa4", "fa3", "aten_flash", "flash_attn"]),
        (ask(BLACKWELL), ["fa4", "aten_cudnn", "aten_flash", "flash_attn"]),
        (ask(BLACKWELL, documents=True), ["fa4", "aten_flash", "flash_attn"]),
        (ask(AMPERE), ["aten_flash", "flash_attn", "aten_efficient"]),
        (KernelRequest("cpu", BF16, 64), ["cpu_flash"]),
    ],
)
def test_the_fastest_by_published_rates_is_tried_first(request_: KernelRequest, order: list[str]) -> None:
    assert preference(request_)[: len(order)] == order


def test_deterministic_runs_on_hopper_do_not_take_cudnn() -> None:
    choice = chosen(ask(HOPPER, deterministic=True))
    assert choice.kernel.name == "aten_flash"
    assert choice.others["aten_cudnn"] == "has no deterministic backward pass"
    with pytest.raises(ConfigError, match=r"on cuda 9\.0, deterministic \(aten_cudnn: has no deterministic"):
        chosen(ask(HOPPER, deterministic=True), "aten_cudnn")


def test_fp32_uses_the_memory_efficient_kernel() -> None:
    assert chosen(ask(HOPPER, FP32)).kernel.name == "aten_efficient"


def test_old_gpus_use_the_memory_efficient_kernel() -> None:
    assert chosen(ask(TURING, torch.float16)).kernel.name == "aten_efficient"


def test_a_gpu_without_a_kernel_lists_what_every_kernel_needs() -> None:
    with pytest.raises(ConfigError) as raised:
        chosen(ask(TURING))
    text = str(raised.value)
    assert "aten_flash: needs compute capability 8.0 or higher, this GPU has 7.5" in text
    assert "aten_efficient: takes bfloat16 from compute capability 8.0 on, this GPU has 7.5" in text
    assert text.endswith("legal here: reference")


@pytest.mark.parametrize(
    ("name", "request_", "reason"),
    [
        ("fa3", ask(BLACKWELL), "needs compute capability 9.0, this GPU has 10.0"),
        ("fa4", ask(AMPERE), "needs compute capability 9.0 to 11.0, this GPU has 8.0"),
        ("fa4", ask(BLACKWELL, head_dim=192), "no backward pass for head_dim 129 to 255 on this GPU"),
        ("fa3", ask(HOPPER, head_dim=256, deterministic=True), "no deterministic backward pass for head_dim above 192"),
        ("fa3", ask(HOPPER), "a wheel for this torch) is not installed"),
        ("fa4", ask(BLACKWELL), "flash-attn-4 is not installed"),
        ("fa4", ask(HOPPER, head_dim=256), "flash-attn-4 is not installed"),
        ("flash_attn", ask(HOPPER), "the flash-attn package is not installed"),
        ("aten_cudnn", ask(HOPPER, head_dim=256), "takes head_dim up to 128"),
        ("aten_flash", ask(HOPPER, head_dim=100), "takes head_dim in multiples of 8"),
        ("aten_flash", ask(ADA, head_dim=208), "no backward pass for head_dim 193 to 224"),
        ("aten_flash", ask(HOPPER, FP32), "takes bfloat16, float16 only"),
    ],
)
def test_a_kernel_that_cannot_names_what_is_missing(name: str, request_: KernelRequest, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        chosen(request_, name)
    assert reason in str(raised.value)


REQUESTS = st.builds(
    KernelRequest,
    st.just("cuda"),
    st.sampled_from([BF16, torch.float16, FP32, torch.float64]),
    st.sampled_from([32, 64, 100, 128, 208, 256, 320]),
    st.sampled_from([TURING, AMPERE, ADA, HOPPER, BLACKWELL, (11, 0), (12, 0)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(REQUESTS)
def test_the_chosen_kernel_is_the_first_capable_one(request_: KernelRequest) -> None:
    order = preference(request_)
    can = [name for name in order if problem_of(KERNELS[name].capabilities, request_) is None]
    if not can:
        with pytest.raises(ConfigError, match="legal here: reference"):
            chosen(request_)
        return
    choice = chosen(request_)
    assert choice.kernel.name == can[0]
    assert set(choice.others) == set(KERNELS) - {choice.kernel.name}
    assert all(choice.others.values())
    for better in order[: order.index(can[0])]:
        assert choice.others[better] == problem_of(KERNELS[better].capabilities, request_)


def test_the_choice_has_a_reason() -> None:
    choice = chosen(ask(AMPERE))
    assert choice.reason.startswith("auto: the first that can of aten_flash, flash_attn")
    assert choice.others["fa3"] == "needs compute capability 9.0, this GPU has 8.0"
    assert chosen(ask(AMPERE), "aten_flash").reason == "attention.kernel=aten_flash"


def test_documents_do_not_get_a_kernel_that_plans_every_shape_unless_it_is_named() -> None:
    asked = ask(HOPPER, documents=True)
    choice = chosen(asked)
    assert choice.kernel.name == "aten_flash"
    plans = "builds a plan for every new shape, and packed documents bring some with every batch"
    assert choice.others["aten_cudnn"] == plans
    assert chosen(ask(HOPPER)).others["flash_attn"] == "expected to be slower, or not asked for"


def test_a_cuda_kernel_on_cpu_is_refused_with_the_legal_names() -> None:
    with pytest.raises(ConfigError, match=r"runs on cuda only.*legal here: reference, cpu_flash"):
        select_kernel("aten_cudnn", torch.device("cpu"), BF16, 64)


class Crashing(CpuFlashKernel):
    """As a package whose function has come to return more."""

    capabilities = KERNELS["aten_flash"].capabilities

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        raise ValueError("too many values to unpack (expected 2)")


class Sound(CpuFlashKernel):
    capabilities = KERNELS["aten_flash"].capabilities


def wrong(result: str, change: Callable[[Tensor], Tensor], *, windows_only: bool = False) -> type[TileKernel]:
    """A kernel one of whose results is changed."""

    class Wrong(Sound):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
            found = dict(zip(("out", "lse"), super().forward(q, k, v, band), strict=True))
            return tuple(self.changed(found, band))  # type: ignore[return-value]

        def backward(self, grads: TileGradients, q: Tensor, k: Tensor, v: Tensor, band: Band) -> TileResult:
            return TileResult(*self.changed(super().backward(grads, q, k, v, band)._asdict(), band))

        @staticmethod
        def changed(found: dict[str, Tensor], band: Band) -> Iterable[Tensor]:
            hit = not windows_only or band.kind == "band"
            return [change(x) if hit and name == result else x for name, x in found.items()]

    return Wrong


def on_cpu(request: KernelRequest, name: str = "auto", **kernels: type[TileKernel]) -> KernelChoice:
    """The choice of a GPU, all of whose kernels compute on a CPU; those not given are sound."""

    def trial(kind: type[TileKernel]) -> str | None:
        return trial_problem(kind, request, torch.device("cpu"))

    fakes = {**dict.fromkeys(KERNELS, Sound), **kernels}
    return choose(name, request, trial, fakes)  # type: ignore[arg-type]


def test_a_named_kernel_warns_about_plans_per_document_shape() -> None:
    reason = on_cpu(ask(HOPPER, documents=True), "aten_cudnn").reason
    assert reason.startswith("attention.kernel=aten_cudnn; it builds a plan for every new shape")
    assert on_cpu(ask(HOPPER), "aten_cudnn").reason == "attention.kernel=aten_cudnn"


def test_a_kernel_that_fails_its_trial_is_passed_over_with_the_reason() -> None:
    choice = on_cpu(ask(HOPPER), fa4=Crashing, aten_cudnn=wrong("dk", lambda x: 1.1 * x))
    failed = {
        "fa4": "failed its trial: ValueError: too many values to unpack (expected 2)",
        "aten_cudnn": "failed its trial: dk of a causal tile is off by 0.1, more than 0.02",
    }
    assert choice.failed == failed
    assert {name: choice.others[name] for name in failed} == failed
    assert isinstance(choice.kernel, Sound)
    assert not on_cpu(ask(HOPPER)).failed


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64])
@pytest.mark.parametrize(
    ("result", "change"),
    [
        ("out", lambda x: x + 0.05),
        ("lse", lambda x: x / math.log(2)),  # to base 2
        ("dq", lambda x: x.flip(1)),  # heads in another order
        ("dk", torch.zeros_like),
        ("dv", lambda x: x.masked_fill(torch.arange(len(x))[:, None, None] == 255, math.nan)),
    ],
)
def test_a_trial_finds_wrong_numbers(result: str, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    request = KernelRequest("cpu", dtype, 64)
    problem = trial_problem(wrong(result, change), request, torch.device("cpu"))
    assert (problem or "").startswith(f"failed its trial: {result} of a causal tile is off by ")
    assert trial_problem(CpuFlashKernel, request, torch.device("cpu")) is None


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_with_one_width_of_heads_are_not_given_wider_values(name: KernelName) -> None:
    can = replace(KERNELS[name].capabilities, problem=no_problem)
    device = "cpu" if "cpu" in can.devices else "cuda"
    request = KernelRequest(device, FP32 if FP32 in can.dtypes else BF16, 64, v_dim=96)
    problem = problem_of(can, request)
    assert problem == (None if can.unequal_head_dims else "takes heads of v no wider than those of q and k")


def test_auto_names_what_takes_wider_values_where_nothing_fast_does() -> None:
    with pytest.raises(ConfigError, match=r"head_dim 64 and v_dim 96 on cpu .*legal here: reference"):
        chosen(KernelRequest("cpu", BF16, 64, v_dim=96))


def test_narrower_values_take_the_fastest_kernel() -> None:
    assert chosen(ask(AMPERE, head_dim=192, v_dim=128)).kernel.name == "aten_flash"
    assert chosen(KernelRequest("cpu", BF16, 64, v_dim=32)).kernel.name == "cpu_flash"


def test_a_trial_has_heads_as_wide_as_the_run() -> None:
    request = KernelRequest("cpu", FP32, 64, v_dim=96)
    assert trial_problem(ReferenceKernel, request, torch.device("cpu")) is None
    assert "failed its trial" in (trial_problem(CpuFlashKernel, request, torch.device("cpu")) or "")


def test_a_trial_pads_narrower_values() -> None:
    assert trial_problem(CpuFlashKernel, KernelRequest("cpu", FP32, 64, v_dim=16), torch.device("cpu")) is None


def test_a_trial_has_windows_where_the_run_has() -> None:
    kind = wrong("out", torch.zeros_like, windows_only=True)
    assert not on_cpu(ask(AMPERE), aten_flash=kind).failed
    assert "of a band tile" in on_cpu(ask(AMPERE, windows=True), aten_flash=kind).failed["aten_flash"]


def test_a_failed_trial_of_a_named_kernel_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"attention.kernel=fa4: .*fa4: failed its trial: ValueError") as raised:
        on_cpu(ask(BLACKWELL), "fa4", fa4=Crashing)
    assert "fa4" not in str(raised.value).partition("legal here: ")[2]


AGAIN = {"always": "yes", "flag": "on demand", "never": "no"}


def test_the_table_of_the_documentation_is_what_kernels_declare() -> None:
    text = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    section = text[text.index("## Kernels") : text.index("`auto` tries them")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "| `" in line]
    found = {row[0].strip("`"): row for row in rows if row[0] != "`attention.kernel`"}
    assert set(found) == set(KERNELS)
    for name, kind in KERNELS.items():
        can, (_, _, gpu, numbers, head_dim, _, again) = kind.capabilities, found[name]
        assert head_dim == ("any" if can.max_head_dim > 1024 else str(can.max_head_dim)), name
        assert again == AGAIN[can.deterministic], name
        if can.devices == {"cuda"}:
            assert ("fp32" in numbers) == (FP32 in can.dtypes), name
            assert ("bf16" in numbers) == (BF16 in can.dtypes), name
            lowest = can.compute_capabilities[0]
            match = re.match(r"(\d+)\.", gpu)
            assert lowest is not None
            assert match is not None
            assert int(match[1]) == lowest[0], name
