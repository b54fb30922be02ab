"""A process that measures: one that raises, dies or is silent for too long is replaced, and the next goes on.

A kernel that reads where it must not leaves a CUDA context in which every later call fails, so after any failure the
process ends. The parent never touches the device.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.plan import Measurement, Row

# What takes seconds to import, and opens no device when it is imported.
PRELOADED = ("torch", "torch._dynamo", "engine.training.trainer", "engine.attention.library")
MAX_ERROR_CHARS = 600


class MeasurementError(Exception):
    """A measurement gave no rows; the text says why."""


class Workers:
    """Runs measurements on `device`, in one process after the other.

    method   forkserver (starts in a tenth of a second, from a server that has imported torch) or spawn
    """

    def __init__(self, device: str, method: str = "forkserver") -> None:
        self._device = device
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(list(PRELOADED))
        self._process: Any = None
        self._pipe: Connection | None = None

    def call(self, measurement: Measurement, timeout_s: float) -> list[Row]:
        """The measurement's rows; raises MeasurementError when it raised, died or took longer."""
        if measurement.fresh:
            self.close()
        if self._process is None:
            self._start(measurement.environment)
        assert self._pipe is not None
        finished = False
        try:
            self._pipe.send((measurement.function, dict(measurement.settings)))
            if not self._pipe.poll(timeout_s):
                raise MeasurementError(f"stopped after {timeout_s:.0f} s without an answer")
            rows, error = self._pipe.recv()
            finished = error is None
        except (EOFError, OSError):
            self._process.join(5)
            raise MeasurementError(f"its process died, exit code {self._process.exitcode}") from None
        finally:
            if not finished or measurement.fresh:
                self.close()
        if error is not None:
            raise MeasurementError(error)
        found: list[Row] = rows
        return found

    def close(self) -> None:
        """End the process at once; what it started ends with it."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process, self._pipe = None, None

    def _start(self, environment: Mapping[str, str]) -> None:
        self._pipe, there = self._context.Pipe()
        arguments = (self._device, there, dict(environment))
        self._process = self._context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        there.close()


def _work(device: str, pipe: Connection, environment: Mapping[str, str]) -> None:
    """Life of a worker: answers (function, settings) with (rows, None) or (None, error) until the pipe closes."""
    os.environ.update(environment)
    import torch

    place = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    while True:
        try:
            function, settings = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            os._exit(0)
        try:
            if place.type == "cuda" and not torch.cuda.is_available():
                raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
            if place.type == "cuda":
                torch.cuda.set_device(place)
            answer = _function(function)(device=place, **settings), None
        except Exception as error:
            answer = None, error_text(error)
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def error_text(error: BaseException) -> str:
    """Type, message and place of an error in one text of bounded length."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(place[0].filename)}:{place[0].lineno})" if place else ""  # noqa: PTH119
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:MAX_ERROR_CHARS]}{where}"
