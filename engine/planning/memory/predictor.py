"""The predictions of a step as others ask for them, its memory and its time: from a process of its own, each at most
once. No torch.

`engine.memory.predict` imagines ranks, plans attention and loads torch, none of which belongs into the process that
asks. Its own is started with the first request, answers one after another and ends when none comes any more.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Literal

from engine.config.errors import ConfigError, RunError
from engine.config.schema import to_plain
from engine.config.settings import DataConfig, RunConfig, dump_config
from engine.planning.methods.topology import Topology
from engine.planning.time.flops import Flops, StepParts, StepTime
from engine.planning.time.machine import Machine
from engine.runs.provenance import python_path

if TYPE_CHECKING:
    from engine.planning.memory.auto import MemoryCandidate

SERVER_MODULE = "engine.memory.predict"
IDLE_S = 30.0  # for which the process waits for another request
TIMEOUT_S = 600.0

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class MemoryPrediction:
    """Peak memory of the rank that needs most, in bytes; on a CPU `device` is what tensors take outside of stores.

    rank             that rank; `host` figures are of one rank too: those of a node are local ranks times as much
    phase            in which the device peak comes: forward, loss, backward or optimizer
    components       {"device": {name: bytes}, "host": {...}} at the two peaks (see `engine.memory.components`)
    phase_peaks      device bytes of every phase
    reserve_bytes    on CUDA, besides: context, communicators, fragmentation
    seconds          that the prediction took
    """

    device: DeviceKind
    world_size: int
    rank: int
    device_peak_bytes: int
    host_peak_bytes: int
    phase: str
    components: Mapping[str, Mapping[str, int]]
    phase_peaks: Mapping[str, int]
    reserve_bytes: int
    seconds: float

    @property
    def needed_bytes(self) -> int:
        """Device memory that a GPU must have free."""
        return self.device_peak_bytes + self.reserve_bytes

    @property
    def needs(self) -> tuple[int, int]:
        """(device, host) bytes, as `Capacity.fit` asks for them."""
        return self.needed_bytes, self.host_peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "needed_bytes": self.needed_bytes}


@dataclass(frozen=True)
class MemoryChoice:
    """The configuration with the best policy in place of auto, and all candidates, the chosen one first.

    fits     False: the configuration is that of the candidate that lacks least
    """

    config: RunConfig
    candidates: tuple[MemoryCandidate, ...]
    reason: str
    fits: bool = True

    @property
    def prediction(self) -> MemoryPrediction | None:
        """Of the policy that was chosen; None where it was configured."""
        return self.candidates[0].prediction if self.candidates else None


# Predicts a configuration on the ranks of a topology (of the whole world).
Predict = Callable[[RunConfig, Topology], MemoryPrediction]
PredictStep = Callable[[RunConfig, Topology, Machine], StepTime]


class Predictor:
    """Asks a process of its own, and remembers the answers."""

    _errors: IO[str]  # what the process says beside its answers

    def __init__(self, module: str = SERVER_MODULE, timeout_s: float = TIMEOUT_S) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def predict(self, config: RunConfig, world: Topology) -> MemoryPrediction:
        """The prediction for `config` on the ranks of `world`.

        Raises ConfigError where the configuration cannot run on these ranks, RunError when the process fails or is
        silent for the time limit.
        """
        return MemoryPrediction(**self._ask(_without_what_takes_no_memory(config), world))

    def predict_step(self, config: RunConfig, world: Topology, machine: Machine) -> StepTime:
        """What `engine.planning.time.step_time.predict_step` says. Raises ConfigError and RunError as `predict`."""
        found = self._ask(config, world, machine=to_plain(machine))
        return StepTime(**{**found, "parts": StepParts(**found["parts"]), "flops": Flops(**found["flops"])})

    def start(self) -> subprocess.Popen[str]:
        """The process, started if none is running; whoever will ask later may start it sooner."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()  # the files of one that has ended
        # Tensors have no values there, and a GPU is not needed: it must not be touched while it is in use.
        environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", self._module]
        pipe = subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environment
        )
        return self._process

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None

    def _ask(self, config: RunConfig, world: Topology, **more: Any) -> dict[str, Any]:
        place = {"nodes": world.nodes, "local_ranks": world.local_ranks}
        request = json.dumps({"config": dump_config(config), **place, **more})
        if request not in self._known:
            # A process that had waited long enough may end just when this comes.
            document = json.loads(self._answer(request, again=True) or self._answer(request))
            if "problems" in document:
                raise ConfigError(document["problems"])
            self._known[request] = document
        return self._known[request]

    def _answer(self, request: str, *, again: bool = False) -> str:
        """One line; empty when the process ended by itself before and may be asked `again`."""
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        if not select.select([process.stdout], [], [], self._timeout_s)[0]:
            self.close()
            raise RunError(f"the prediction did not end within {self._timeout_s:.0f} s and was stopped.")
        answer = process.stdout.readline()
        if answer or (again and process.wait() == 0):
            return answer
        self._errors.seek(0)
        words = (self._errors.read().strip().splitlines() or ["nothing"])[-1]
        raise RunError(f"the prediction failed with exit code {process.wait()}; its last words: {words}.")


@functools.cache
def shared_predictor() -> Predictor:
    """The one of this process: starting torch takes longer than most predictions."""
    predictor = Predictor()
    atexit.register(predictor.close)
    return predictor


def _without_what_takes_no_memory(config: RunConfig) -> RunConfig:
    """Runs that differ in these need the same; what a machine has is no part of what a rank needs, either."""
    plain = RunConfig()
    return replace(
        config,
        exp=plain.exp,
        seed=plain.seed,
        data=DataConfig(),
        model=replace(config.model, name=plain.model.name, init_from=None, require_init_from=False),
        train=replace(
            config.train,
            steps=plain.train.steps,
            checkpoint=plain.train.checkpoint,
            guard=plain.train.guard,
            compile=False,
        ),
        memory=replace(config.memory, device_bytes=None, host_bytes=None),
        optimizer=replace(plain.optimizer, max_grad_norm=config.optimizer.max_grad_norm),
        cluster=replace(plain.cluster, backend=config.cluster.backend, machine=config.cluster.machine),
    )
