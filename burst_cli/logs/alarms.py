"""The newest line of a run's logs that sounds like a warning or an error, followed in bounded memory and time."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

from burst_cli.logs.files import LogFile, LogRequest, find_logs, visible_text
from burst_cli.logs.read import Line, LogFollower
from burst_cli.logs.show import label
from cluster.remote_text import one_line
from engine.runs.folder import RunFolder

MAX_LOGS = 1024
FRESH_S = 60.0  # after so long nobody needs to see it any more
_MOST_BYTES = 64 * 1024  # of one log at a look
_SCANS = 10  # looks between scans for new files
_LINE_CHARACTERS = 160
_ALARM = re.compile(rb"\b(?:\w*warn(?:ing)?|\w*error|\w*exception|fatal|killed)\b", re.IGNORECASE)


class AlarmWatch:
    """`look` reads what is new; `newest` is the last such line, as `host:rank | line`, while it is fresh."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._followers: dict[LogFile, LogFollower] = {}
        self._looks = 0
        self._line: str | None = None
        self._seen_at = 0.0

    def look(self) -> None:
        """Read what has come since the last time; of a flood only its end."""
        if self._looks % _SCANS == 0:
            for log in find_logs(self._run, LogRequest())[:MAX_LOGS]:
                self._followers.setdefault(log, LogFollower(log.path, 0, _is_alarm))
        self._looks += 1
        for log, follower in self._followers.items():
            lines, _ = follower.poll(_MOST_BYTES)
            for line in deque(lines, maxlen=1):
                text = one_line(visible_text(line.text), _LINE_CHARACTERS)
                self._line, self._seen_at = f"{label([log])} | {text}", self._clock()

    def newest(self) -> str | None:
        """The last line of alarm; None when there was none lately."""
        return self._line if self._clock() - self._seen_at < FRESH_S else None


def _is_alarm(line: Line) -> bool:
    return _ALARM.search(line.text) is not None
