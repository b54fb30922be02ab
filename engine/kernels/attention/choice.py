"""Which kernel a run takes, and why none of the others: pure functions of a request and of what kernels declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from engine.config.errors import ConfigError
from engine.config.settings import KernelName
from engine.kernels.attention.base import Capabilities, ComputeCapability, KernelRequest, TileKernel, no_problem
from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.kernels.attention.cuda import AtenCudnnKernel, AtenFlashKernel
from engine.kernels.attention.efficient import AtenEfficientKernel
from engine.kernels.attention.flash_packages import Flash3Kernel, Flash4Kernel, FlashAttnKernel
from engine.kernels.attention.padded import build_kernel
from engine.kernels.attention.reference import ReferenceKernel

KERNELS: dict[KernelName, type[TileKernel]] = {
    "reference": ReferenceKernel,
    "cpu_flash": CpuFlashKernel,
    "aten_flash": AtenFlashKernel,
    "aten_cudnn": AtenCudnnKernel,
    "aten_efficient": AtenEfficientKernel,
    "flash_attn": FlashAttnKernel,
    "fa3": Flash3Kernel,
    "fa4": Flash4Kernel,
}


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a run, why it, and of every other one why not; `failed` of those whose trial went wrong."""

    kernel: TileKernel
    reason: str
    others: Mapping[str, str]
    failed: Mapping[str, str]


def choose(
    name: KernelName,
    request: KernelRequest,
    trial: Callable[[type[TileKernel]], str | None],
    kernels: Mapping[KernelName, type[TileKernel]] = KERNELS,
) -> KernelChoice:
    """The named kernel, or for `auto` the first of `preference` that can and passes its trial.

    ConfigError, with every reason and what would be legal, if there is none; a kernel that was named is never replaced.

    trial   what is wrong with what a kernel computes here; None: nothing
    """
    order = preference(request) if name == "auto" else [name]
    problems: dict[str, str] = {}
    failed: dict[str, str] = {}
    for candidate in order:
        problem = problem_of(kernels[candidate].capabilities, request)
        if problem is None:
            problem = trial(kernels[candidate])
            if problem is None:
                others = _others(candidate, request, problems)
                return KernelChoice(build_kernel(kernels[candidate], request), _reason(name, request), others, failed)
            failed[candidate] = problem
        problems[candidate] = problem
    legal = [other for other in kernels if problem_of(kernels[other].capabilities, request) is None]
    raise ConfigError(
        f"attention.kernel={name}: no kernel for {request.dtype} with {_dims(request)} on {_where(request)} "
        f"({'; '.join(f'{other}: {problem}' for other, problem in problems.items())}); "
        f"legal here: {', '.join(other for other in legal if other not in problems)}"
    )


def preference(request: KernelRequest) -> list[KernelName]:
    """What `auto` tries, the one that is expected to be fastest first.

    On Hopper FlashAttention-4 is the fastest (a causal tile of 32K on an H200: 655 and 594 TFLOP/s forward and
    backward, cuDNN 611 and 546). cuDNN runs at 1.8 times the speed of FlashAttention-2 and like FlashAttention-3, which
    is better only where cuDNN would hand windows to FlashAttention-2. Packed documents have new shapes in every batch:
    no kernel that plans each. The package flash-attn has the same kernels as torch. `reference` is for comparison only:
    its memory is quadratic.
    """
    if request.device != "cuda":
        return ["cpu_flash"]
    rest: list[KernelName] = ["aten_flash", "flash_attn", "aten_efficient"]
    major = (request.compute_capability or (0, 0))[0]
    first: list[KernelName] = []
    if major == 9:
        first = ["fa4", "fa3", "aten_cudnn"] if request.windows else ["fa4", "aten_cudnn", "fa3"]
    elif major >= 10:
        first = ["fa4", "aten_cudnn"]
    return [name for name in (*first, *rest) if not (request.documents and KERNELS[name].capabilities.plans_shapes)]


def problem_of(can: Capabilities, request: KernelRequest) -> str | None:
    """Why a kernel cannot do what is asked, in words; None if it can."""
    if request.device not in can.devices:
        return f"runs on {', '.join(sorted(can.devices))} only"
    if request.dtype not in can.dtypes:
        return f"takes {', '.join(sorted(str(d).removeprefix('torch.') for d in can.dtypes))} only"
    problem = _head_dim_problem(can, request) or _capability_problem(can, request)
    if problem is None and request.deterministic and can.deterministic == "never":
        problem = "has no deterministic backward pass"
    return problem or can.problem(request)


def _head_dim_problem(can: Capabilities, request: KernelRequest) -> str | None:
    if max(request.head_dims) > can.max_head_dim:
        return f"takes head_dim up to {can.max_head_dim}"
    qk_dim, v_dim = request.head_dims
    if v_dim > qk_dim and not can.unequal_head_dims:
        return "takes heads of v no wider than those of q and k"
    widths = request.head_dims if can.unequal_head_dims else (qk_dim,)  # narrower heads of v are padded to qk_dim
    if any(dim % can.head_dim_multiple for dim in widths):
        return f"takes head_dim in multiples of {can.head_dim_multiple}"
    return None


def _capability_problem(can: Capabilities, request: KernelRequest) -> str | None:
    has = request.compute_capability
    if has is None:
        return None
    lowest, highest = can.compute_capabilities
    wanted = _range(lowest, highest)
    if (lowest is not None and has < lowest) or (highest is not None and has > highest):
        return f"needs compute capability {wanted}, this GPU has {_dotted(has)}"
    if request.dtype == torch.bfloat16 and can.bfloat16_from is not None and has < can.bfloat16_from:
        return f"takes bfloat16 from compute capability {_dotted(can.bfloat16_from)} on, this GPU has {_dotted(has)}"
    return None


def _reason(name: KernelName, request: KernelRequest) -> str:
    if name != "auto":
        return f"attention.kernel={name}{_new_shapes(name, request, '; it ')}"
    return f"auto: the first that can of {', '.join(preference(request))} on {_where(request)}"


def _others(chosen: KernelName, request: KernelRequest, problems: Mapping[str, str]) -> dict[str, str]:
    """Of every kernel that was not chosen, why: what it lacks, or that it was not needed. Loads no further library."""
    others: dict[str, str] = {}
    for name, kind in KERNELS.items():
        if name == chosen:
            continue
        capable = replace(kind.capabilities, problem=no_problem)
        others[name] = (
            problems.get(name)
            or problem_of(capable, request)
            or _new_shapes(name, request)
            or "expected to be slower, or not asked for"
        )
    return others


def _new_shapes(name: KernelName, request: KernelRequest, before: str = "") -> str:
    """What documents mean for a kernel that plans shapes; empty for others."""
    if not (request.documents and KERNELS[name].capabilities.plans_shapes):
        return ""
    return f"{before}builds a plan for every new shape, and packed documents bring some with every batch"


def _dims(request: KernelRequest) -> str:
    qk_dim, v_dim = request.head_dims
    return f"head_dim {qk_dim}" if qk_dim == v_dim else f"head_dim {qk_dim} and v_dim {v_dim}"


def _where(request: KernelRequest) -> str:
    has = request.compute_capability
    wish = ", deterministic" if request.deterministic else ""
    return f"{request.device}{'' if has is None else f' {_dotted(has)}'}{wish}"


def _range(lowest: ComputeCapability | None, highest: ComputeCapability | None) -> str:
    if lowest is None or highest is None:
        return f"{_dotted(lowest)} or higher" if lowest is not None else f"up to {_dotted(highest or (0, 0))}"
    return _dotted(lowest) if lowest == highest else f"{_dotted(lowest)} to {_dotted(highest)}"


def _dotted(capability: ComputeCapability) -> str:
    return ".".join(map(str, capability))
