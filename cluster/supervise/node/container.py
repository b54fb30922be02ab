"""The container that a run's command started, by its engine's command line: stopped, killed, removed."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Callable, Optional

_TIMEOUT_S = 20.0


class Helpers:
    """Children of this process that are no part of the run; known before anyone can take them for members."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()

    def pids(self) -> set[int]:
        """Numbers of those that have not been waited for."""
        with self._lock:
            return set(self._pids)

    def run(self, words: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[bytes]":
        """The end of a command and what it printed. Raises OSError, subprocess.TimeoutExpired."""
        with self._lock:
            child = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(os.environ, LC_ALL="C"),
                start_new_session=True,
            )
            self._pids.add(child.pid)
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise
        finally:
            with self._lock:
                self._pids.discard(child.pid)
        return subprocess.CompletedProcess(list(words), child.returncode, out, err)


class Container:
    """Container `name`, which belongs to the run only if one of its labels is the run id."""

    def __init__(self, engine: Sequence[str], name: str, run_id: str, helpers: Optional[Helpers] = None) -> None:
        self._engine, self.name, self._run_id = list(engine), name, run_id
        self._helpers = helpers or Helpers()

    def stop(self, grace_s: float) -> None:
        """Ask it to end, in the background."""
        seconds = max(1, int(grace_s))
        self._later(lambda: self._act(["stop", "-t", str(seconds), self.name], seconds + _TIMEOUT_S))

    def kill(self) -> None:
        """End it now, in the background."""
        self._later(lambda: self._act(["kill", self.name], _TIMEOUT_S))

    def remove(self, wait_s: float, sure_s: float = 0.0) -> str:
        """Remove it, running or not; what stands in the way, "" when it is gone.

        `sure_s`: so long it may still appear, made by an engine whose client was killed.
        """
        begin = time.monotonic()
        while True:
            passed = time.monotonic() - begin
            ours = self.is_ours(min(wait_s, _TIMEOUT_S))
            if ours is False and passed >= sure_s:
                return ""
            if ours and self._call(["rm", "-f", self.name], _TIMEOUT_S) == 0:
                return ""
            if passed > wait_s:
                return f"the engine did not remove container {self.name}"
            time.sleep(0.3)

    def is_ours(self, timeout_s: float = _TIMEOUT_S) -> Optional[bool]:
        """Whether there is such a container with our label; None when the engine does not say."""
        words = ["container", "inspect", "--format", "{{json .Config.Labels}}", self.name]
        try:
            done = self._helpers.run(self._engine + words, timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            text = done.stderr.decode("utf-8", "replace").lower()
            return False if "no such container" in text else None
        with contextlib.suppress(ValueError):
            labels = json.loads(done.stdout.decode("utf-8", "replace"))
            return isinstance(labels, dict) and self._run_id in labels.values()
        return None

    def _act(self, words: list[str], timeout_s: float) -> None:
        if self.is_ours():
            self._call(words, timeout_s)

    def _call(self, words: list[str], timeout_s: float) -> Optional[int]:
        try:
            return self._helpers.run(self._engine + words, timeout_s).returncode
        except (OSError, subprocess.TimeoutExpired):
            return None

    def _later(self, act: Callable[[], object]) -> None:
        thread = threading.Thread(target=act, name="container")
        thread.daemon = True
        thread.start()
