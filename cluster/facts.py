"""What one machine is, asked once before anything is planned, without importing torch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.runs.provenance import CODE_ROOT, output_of


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
        cores=len(os.sched_getaffinity(0)),
        gpus=visible_gpus(output_of("nvidia-smi", "-L") or "", os.environ),
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
    if CODE_ROOT.name in ("site-packages", "dist-packages"):
        return None
    old = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(CODE_ROOT), *(entry for entry in old if entry not in ("", str(CODE_ROOT)))])
