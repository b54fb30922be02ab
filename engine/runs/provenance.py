"""Where a run comes from: code, versions, hardware. Standard library only; torch is not loaded."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.runs.files import utc_now
from engine.runs.host_memory import meminfo_bytes

PACKAGES = ("burst-train", "torch", "numpy", "safetensors", "tokenizers", "pyyaml", "flash-attn", "triton")
IMAGE_VARIABLE = "BURST_IMAGE"
MAX_DIFF_CHARACTERS = 1_000_000
CODE_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 10.0


def python_path() -> str:
    """PYTHONPATH of a process that runs this code, installed or not: the code before what is there already."""
    return os.pathsep.join(filter(None, [str(CODE_ROOT), os.environ.get("PYTHONPATH")]))


def collect_provenance() -> dict[str, Any]:
    """{collected_at, command, cwd, git, versions, hardware, image}; what cannot be found out is null.

    The git commit and uncommitted changes are those of the folder that holds the packages, where that is the top of a
    checkout (not where it merely lies in one, as site-packages of a virtual environment may).
    """
    return {
        "collected_at": utc_now(),
        "command": list(sys.argv),
        "cwd": str(Path.cwd()),
        "git": git_facts(CODE_ROOT),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
        "hardware": _hardware(),
        "image": os.environ.get(IMAGE_VARIABLE),
    }


def git_facts(root: Path) -> dict[str, Any] | None:
    """{sha, branch, dirty, status, diff, diff_truncated} of the checkout whose top is `root`, or None."""

    def git(*arguments: str) -> str:
        return output_of("git", "-C", str(root), *arguments) or ""

    top = git("rev-parse", "--show-toplevel").strip()
    if not top or Path(top).resolve() != root.resolve():
        return None
    status, diff = git("status", "--porcelain"), git("diff", "HEAD")
    return {
        "sha": git("rev-parse", "HEAD").strip() or None,
        "branch": git("rev-parse", "--abbrev-ref", "HEAD").strip() or None,
        "dirty": bool(status.strip()),
        "status": status.splitlines(),
        "diff": diff[:MAX_DIFF_CHARACTERS],
        "diff_truncated": len(diff) > MAX_DIFF_CHARACTERS,
    }


def _hardware() -> dict[str, Any]:
    gpus = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": meminfo_bytes("MemTotal"),
        "gpus": gpus.splitlines() if gpus else [],
    }


def version_of(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str | None:
    """The processor's name."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor() or None)


def output_of(*command: str) -> str | None:
    """Standard output of `command`, or None when it is missing, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace") if result.returncode == 0 else None
