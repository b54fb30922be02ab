"""The exact prediction in a process of its own: torch stays out of this one, and so do its imagined ranks. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError, RunError
from engine.config.settings import RunConfig, dump_config
from engine.planning.methods.topology import Topology

TARGET_MODULE = "engine.memory.predict_target"
TIMEOUT_S = 600.0
_CODE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class PredictedMemory:
    """`engine.memory.predict.MemoryPrediction` as its process wrote it; bytes of one rank."""

    device_peak_bytes: int
    host_peak_bytes: int
    needed_bytes: int
    phase: str
    components: Mapping[str, Mapping[str, int]]
    document: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All that the prediction says, as plain values."""
        return dict(self.document)


def predict_apart(
    config: RunConfig, world: Topology, *, module: str = TARGET_MODULE, timeout_s: float = TIMEOUT_S
) -> PredictedMemory:
    """The prediction for `config` on the ranks of `world`; start-up of torch takes most of its seconds.

    Raises ConfigError where the configuration cannot run on these ranks, RunError when the process fails or is silent
    for `timeout_s` seconds.
    """
    request = json.dumps({"config": dump_config(config), "nodes": world.nodes, "local_ranks": world.local_ranks})
    command = [sys.executable, "-m", module]
    path = os.pathsep.join([str(_CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Tensors have no values there, and a GPU is not needed: it must not be touched while it is in use.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        answer = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"the memory prediction did not end within {timeout_s:.0f} s and was stopped.") from None
    return _read(answer)


def _read(answer: subprocess.CompletedProcess[str]) -> PredictedMemory:
    try:
        document = json.loads(answer.stdout)
    except ValueError:
        document = {}
    if "problems" in document:
        raise ConfigError(document["problems"])
    if answer.returncode or "device_peak_bytes" not in document:
        words = (answer.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RunError(f"the memory prediction failed with exit code {answer.returncode}; its last words: {words}.")
    return PredictedMemory(
        document["device_peak_bytes"],
        document["host_peak_bytes"],
        document["needed_bytes"],
        document["phase"],
        document["components"],
        document,
    )
