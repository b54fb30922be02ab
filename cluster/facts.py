"""What one machine is, asked once before anything is planned, without importing torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class MachineFacts:
    """One machine as a launch plan needs it.

    hostname: names the log folder and the environment file.
    cores: CPU cores this process may use.
    gpus: CUDA devices that are visible; 0 without an NVIDIA driver.
    python: the interpreter that runs the ranks.
    cwd: the folder relative paths of the configuration start from.
    python_path: PYTHONPATH of the ranks, so that they find `engine`; None when burst is installed in site-packages.
    has_chosen_gpus: CUDA_VISIBLE_DEVICES says which of its GPUs to use.
    """

    hostname: str
    cores: int
    gpus: int
    python: str = sys.executable
    cwd: str = "."
    python_path: str | None = None
    has_chosen_gpus: bool = False


def probe_local_node() -> MachineFacts:
    """The facts of this machine, this interpreter and this working folder."""
    return MachineFacts(
        hostname=socket.gethostname(),
        cores=_usable_cores(),
        gpus=visible_gpus(_list_gpus(), os.environ),
        python=sys.executable,
        cwd=str(Path.cwd()),
        python_path=_python_path(),
        has_chosen_gpus="CUDA_VISIBLE_DEVICES" in os.environ,
    )


def visible_gpus(listing: str, environment: Mapping[str, str]) -> int:
    """How many devices `nvidia-smi -L` lists, at most as many as CUDA_VISIBLE_DEVICES names."""
    present = sum(line.startswith("GPU ") for line in listing.splitlines())
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    names = [name.strip() for name in chosen.split(",")]
    # CUDA stops at the first entry it does not know; "-1" is the usual way to hide everything.
    valid = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(present, valid)


def _python_path() -> str | None:
    """The folder of the packages before what PYTHONPATH already holds; None when they are installed."""
    root = Path(__file__).resolve().parent.parent
    if root.name in ("site-packages", "dist-packages"):
        return None
    old = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(root)]
    return os.pathsep.join([str(root), *old])


def _list_gpus() -> str:
    try:
        result = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
