"""What `processes.py` tells, by psutil: for a run on a machine without /proc. Python 3.6.

psutil is imported by the functions: nodes that have /proc need not have it.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional

_STATES = {
    "running": "R",
    "sleeping": "S",
    "disk-sleep": "D",
    "stopped": "T",
    "tracing-stop": "t",
    "zombie": "Z",
    "dead": "X",
}


class Facts(NamedTuple):
    """Parent, letter of the state, and start of one process."""

    parent: int
    state: str
    start: str


def process_facts(pid: int) -> Optional[Facts]:
    """What is known of process `pid`; None when there is no such process."""
    found = _ask(pid, lambda process: Facts(process.ppid(), process.status(), str(process.create_time())))
    return None if found is None else found._replace(state=_STATES.get(found.state, "S"))


def process_environ(pid: int) -> Optional[Dict[bytes, bytes]]:
    """The environment process `pid` was started with; None when it is not ours to see."""
    found = _ask(pid, lambda process: process.environ())
    return None if found is None else {_bytes(name): _bytes(value) for name, value in found.items()}


def process_pids() -> List[int]:
    """Numbers of all processes that are to be seen."""
    import psutil

    return list(psutil.pids())


def process_resident_bytes(pid: int) -> Optional[int]:
    """The resident set of process `pid`; None when it is not to be seen."""
    found: Optional[int] = _ask(pid, lambda process: process.memory_info().rss)
    return found


def process_cpu_seconds(pid: int) -> Optional[float]:
    """Processor time that process `pid` has used; None when it is not to be seen."""
    found: Optional[float] = _ask(pid, lambda process: sum(process.cpu_times()[:2]))
    return found


def _ask(pid: int, question: Callable[[Any], Any]) -> Any:
    import psutil

    try:
        return question(psutil.Process(pid))
    except (psutil.Error, OSError):
        return None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
