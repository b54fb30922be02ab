"""Out-of-memory errors: recognises them, reports memory figures, and suggests settings. No torch, few allocations.

The functions here run while a rank is dying for lack of memory, so they look at counters and at the error's own text
and build nothing of any size.
"""

from __future__ import annotations

import contextlib
import errno
import re
import resource
import sys
from pathlib import Path
from typing import Any, Literal

from engine.config.settings import LossConfig, MemoryConfig, RunConfig

Where = Literal["device", "host"]

RESERVE_BYTES = 4 * 2**20  # ample for an error record of at most 24,000 characters
_DEVICE_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIP out of memory",
)
_HOST_TEXTS = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
# "Tried to allocate 20.00 GiB" (CUDA), "you tried to allocate 400000000000 bytes" (CPU).
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|B|KiB|MiB|GiB|TiB)\b", re.IGNORECASE)
_UNITS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def measure_out_of_memory(error: BaseException) -> dict[str, Any] | None:
    """Return what this process knows about the out-of-memory error `error`; None for any other error.

    where           device: GPU memory; host: what the CPU allocator and Python use, on a CPU run everything
    device          as torch names it: cuda:0, cpu
    peak_bytes      most that was in use so far, as `peak_source` counts it
    requested_bytes the allocation that failed
    capacity_bytes  memory of the device

    Unknown values are None. Reads counters only: those of the CUDA allocator where this process uses CUDA, else the
    resident set.
    """
    origin = _origin(error)
    if origin is None:
        return None
    where, device, source = "host", "cpu", "resident set of the process since its start"
    peak: int | None = None
    capacity: int | None = None
    if _is_of_host(origin):
        peak = peak_resident_bytes()
    else:
        where, (device, peak, source, capacity) = "device", _on_cuda()
    return {
        "where": where,
        "device": device,
        "peak_bytes": peak,
        "peak_source": source,
        "requested_bytes": _requested_bytes(origin),
        "capacity_bytes": capacity,
    }


def peak_resident_bytes(status: str = "/proc/self/status") -> int:
    """Return the peak resident set of this process in bytes.

    VmHWM belongs to the program; ru_maxrss may still hold that of the parent from before exec.
    """
    with contextlib.suppress(OSError):
        for line in Path(status).read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def less_memory(config: RunConfig, where: Where) -> tuple[str, ...]:
    """Return settings that reduce the memory of a rank of `config`, cheapest first; never empty.

    On the CPU, device and host memory are the same, so host stores help only a GPU, where they have a separate limit.
    """
    memory, chunk_tokens = config.memory, LossConfig().chunk_tokens
    on_gpu, keeps = config.cluster.backend != "gloo", memory.activation_store == "host"
    on_host, of_device = where == "host", where == "device" or not on_gpu
    moments = memory.optimizer_store == "host"
    changes = (
        (on_host and not on_gpu and keeps, "memory.activation_store=device"),
        (of_device and config.loss.chunk_tokens > chunk_tokens, f"loss.chunk_tokens={chunk_tokens}"),
        (
            of_device and memory.tile_tokens is None and config.attention.chunk_tokens is None,
            f"memory.tile_tokens={config.model.hidden_size}",
        ),
        (on_gpu and not on_host and not keeps, "memory.activation_store=host"),
        (on_gpu and not on_host and not moments, "memory.optimizer_store=host"),
        *((of_device or keeps, policy) for policy in _cheaper_policies(memory)),
        (on_gpu and on_host and keeps, "memory.activation_store=device"),
        (on_gpu and on_host and moments, "memory.optimizer_store=device"),
        (config.train.micro_batch_size > 1, "train.micro_batch_size=1 (and more train.grad_accum_steps)"),
        # Ranks on the CPU only share the memory of their machine in another way.
        (on_gpu, "more ranks (cluster.ranks_per_node), which share one sequence"),
        (True, "a smaller train.seq_len"),
    )
    return tuple(change for helps, change in changes if helps)


def less_memory_text(config: RunConfig, where: Where) -> str:
    """Return `less_memory` as one sentence."""
    changes = "; ".join(less_memory(config, where))
    return f"Use less memory per rank, with the first of these that you can afford: {changes}."


def _origin(error: BaseException) -> BaseException | None:
    """Return the first out-of-memory error in the chain of causes and contexts."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        is_text = isinstance(current, RuntimeError) and any(
            text in str(current) for text in _DEVICE_TEXTS + _HOST_TEXTS
        )
        is_number = isinstance(current, OSError) and current.errno == errno.ENOMEM
        if is_text or is_number or isinstance(current, MemoryError) or type(current).__name__ == "OutOfMemoryError":
            return current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None


def _is_of_host(origin: BaseException) -> bool:
    if isinstance(origin, (MemoryError, OSError)):
        return True
    host, device = (any(words in str(origin) for words in texts) for texts in (_HOST_TEXTS, _DEVICE_TEXTS))
    return host and not device


def _requested_bytes(origin: BaseException) -> int | None:
    """Return the size of the failed allocation: attribute `requested_bytes` of the error, else parsed from its text."""
    asked = getattr(origin, "requested_bytes", None)
    if isinstance(asked, int):
        return asked
    found = _REQUESTED.search(str(origin))
    return round(float(found[1]) * _UNITS[found[2].lower()]) if found else None


def _on_cuda() -> tuple[str, int | None, str, int | None]:
    """Return device, peak, its source and capacity from the caching allocator of this process, if it uses CUDA."""
    torch = sys.modules.get("torch")  # never imported here: a rank that ran out of memory before that has no allocator
    with contextlib.suppress(RuntimeError):  # the device was lost
        if torch is not None and torch.cuda.is_initialized():
            index = torch.cuda.current_device()
            peak = int(torch.cuda.max_memory_allocated(index))
            capacity = int(torch.cuda.get_device_properties(index).total_memory)
            return f"cuda:{index}", peak, "CUDA caching allocator, peak of this step", capacity
    return "cuda", None, "unknown", None


def _cheaper_policies(memory: MemoryConfig) -> list[str]:
    """Return the policies that save less, in order of recomputation."""
    kinds = set(memory.checkpoint_layers or (memory.activation_checkpoint,))
    if kinds == {"full"}:
        return []
    full = "memory.activation_checkpoint=full"
    if memory.checkpoint_layers:
        return [f"{full} memory.checkpoint_layers=[]"]
    if kinds == {"none"}:
        return ["memory.activation_checkpoint=attn_out", full]
    if kinds <= {"attn_out", "attn_out_every"}:
        return [f"memory.activation_checkpoint=seq_fraction memory.saved_fraction={memory.saved_fraction}", full]
    return [full]
