"""The environment of ranks, as every launcher sets it, and what the configuration puts on top."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.env.facts import EnvironmentVariable
from cluster.env.plan import FLIGHT_RECORDER_ENTRIES, communicator_order
from engine.runs.folder import NODE_VARIABLE, RANK_LOGS_VARIABLE, RUN_ID_VARIABLE

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Threads:
    """CPU threads of one rank, and why so many."""

    per_rank: int
    reason: str


def run_variables(run_id: str, node: str, log_dir: str, threads: Threads) -> list[EnvironmentVariable]:
    """What marks the processes of a run on a node, tells them where to write, and bounds their threads."""
    return [
        EnvironmentVariable(RUN_ID_VARIABLE, run_id, "marks every process of this run, so that all can be found"),
        EnvironmentVariable(NODE_VARIABLE, node, "the node, as processes and files of the run are known by"),
        EnvironmentVariable(RANK_LOGS_VARIABLE, log_dir, "each rank writes its output to its own file there"),
        EnvironmentVariable("OMP_NUM_THREADS", str(threads.per_rank), threads.reason),
        EnvironmentVariable("PYTHONSAFEPATH", "1", "a folder named engine where burst is started must not be imported"),
        EnvironmentVariable("PYTHONFAULTHANDLER", "1", "a crash in native code leaves Python stacks in the log"),
    ]


def recorder_variables(log_dir: str) -> list[EnvironmentVariable]:
    """The flight recorder, which works with gloo, too, once its size is set."""
    return [
        EnvironmentVariable(
            "TORCH_FR_BUFFER_SIZE", str(FLIGHT_RECORDER_ENTRIES), "the last collectives of a rank tell who hangs"
        ),
        EnvironmentVariable(
            "TORCH_FR_DUMP_TEMP_FILE", f"{log_dir}/flight_recorder_rank", "where NCCL's watchdog leaves them"
        ),
    ]


def backend_variables(backend: str, *, share_device: bool) -> list[EnvironmentVariable]:
    """What the transport of the ranks needs anywhere."""
    if backend == "nccl":
        ends = EnvironmentVariable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "a failed collective ends the rank, no hang")
        return [ends, communicator_order()]
    if share_device:
        return []
    return [EnvironmentVariable("CUDA_VISIBLE_DEVICES", "", "the ranks of this run compute on the CPU")]


def with_settings(variables: Iterable[EnvironmentVariable], settings: Sequence[str]) -> tuple[EnvironmentVariable, ...]:
    """`variables`, of which the last of a name counts, with those of cluster.environment on top."""
    by_name = {variable.name: variable for variable in variables}
    for setting in settings:
        name, value = split_assignment(setting)
        by_name[name] = EnvironmentVariable(name, value, "cluster.environment")
    return tuple(by_name.values())


def split_assignment(text: str) -> tuple[str, str]:
    """(name, value) of NAME=VALUE. Raises ValueError; `engine.config.rules` has refused such settings before."""
    found = _ASSIGNMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return found[1], found[2]
