"""What worker processes of the GPU benchmark are given to run in tests."""

from __future__ import annotations

import os
import time
from typing import Any

import torch


def works(device: torch.device, value: int) -> list[dict[str, Any]]:
    """A row with the value and the process that made it."""
    return [{"value": value, "pid": os.getpid(), "device": str(device)}]


def raises(device: torch.device) -> list[dict[str, Any]]:
    raise ValueError("this kernel\nis broken")


def dies(device: torch.device) -> list[dict[str, Any]]:
    os._exit(7)


def hangs(device: torch.device) -> list[dict[str, Any]]:
    time.sleep(60)
    return []
