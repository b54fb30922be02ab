"""The container in which the ranks of one node run: asked to end, killed, removed, if it is the run's own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Sequence

from cluster.agent.processes import Helpers

_TIMEOUT_S = 20.0
_POLL_S = 0.3


class Container:
    """Container `name`, which belongs to the run only if one of its labels is the run id."""

    def __init__(self, engine: Sequence[str], name: str, run_id: str, helpers: Helpers | None = None) -> None:
        self._engine, self.name, self._run_id = list(engine), name, run_id
        self._helpers = helpers or Helpers()

    def stop(self, grace_s: float) -> None:
        """Ask it to end, in the background."""
        seconds = max(1, int(grace_s))
        self._later(seconds + _TIMEOUT_S, "stop", "-t", str(seconds))

    def kill(self) -> None:
        """End it now, in the background."""
        self._later(_TIMEOUT_S, "kill")

    def remove(self, wait_s: float, sure_s: float = 0.0) -> str:
        """Remove it, running or not; what stands in the way, "" when it is gone.

        `sure_s`: so long it may still appear, made by an engine whose client was killed.
        """
        begin = time.monotonic()
        while True:
            passed = time.monotonic() - begin
            ours = self.is_ours(min(wait_s, _TIMEOUT_S))
            if (ours is False and passed >= sure_s) or (ours and self._is_done(_TIMEOUT_S, "rm", "-f")):
                return ""
            if passed > wait_s:
                return f"the engine did not remove container {self.name}"
            time.sleep(_POLL_S)

    def is_ours(self, timeout_s: float = _TIMEOUT_S) -> bool | None:
        """Whether there is such a container with our label; None when the engine does not say."""
        done = self._call(timeout_s, "container", "inspect", "--format", "{{json .Config.Labels}}")
        if done is not None and done.returncode:
            return False if "no such container" in done.stderr.decode("utf-8", "replace").lower() else None
        with contextlib.suppress(ValueError):
            labels = json.loads(done.stdout.decode("utf-8", "replace") if done is not None else "")
            return isinstance(labels, dict) and self._run_id in labels.values()
        return None

    def _later(self, timeout_s: float, *words: str) -> None:
        def act() -> None:
            if self.is_ours():
                self._call(timeout_s, *words)

        threading.Thread(target=act, daemon=True).start()

    def _is_done(self, timeout_s: float, *words: str) -> bool:
        done = self._call(timeout_s, *words)
        return done is not None and done.returncode == 0

    def _call(self, timeout_s: float, *words: str) -> subprocess.CompletedProcess[bytes] | None:
        """What the engine says to `words` of the container; None: nothing."""
        try:
            return self._helpers.run([*self._engine, *words, self.name], timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            return None
