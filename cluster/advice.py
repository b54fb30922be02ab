"""What to do after a failure, in one or two sentences."""

from __future__ import annotations

import shlex
from pathlib import Path

from cluster.failure import Failure
from cluster.ssh.hosts import node_command, reaching
from engine.config.settings import RunConfig
from engine.runs.folder import typed_overrides
from engine.runs.oom import Where, less_memory_text


def advice(failure: Failure, run_path: Path, config: RunConfig) -> str:
    """What to do next; `run_path` is the run folder."""
    log = failure.log or "the log"
    resume = f"burst resume {shlex.quote(run_path.name)}"
    again = f"`{resume}` starts the same ranks again."
    match failure.kind:
        case "config" | "user":
            return "Correct the setting or file that the message names and launch again."
        case "oom":
            return less_memory_text(config, _where(failure))
        case "signal" if failure.signal == "SIGKILL":
            remedy = _lower(less_memory_text(config, "host"))
            return f"If `dmesg` shows that the kernel ran out of memory, {remedy} If not, ask who sent the signal."
        case "peer_lost":
            return f"The rank that it lost said nothing: compare the logs beside {log}."
        case "hang":
            return f"Read where every rank was in {failure.stacks or log} and beside it; {again}"
        case "node_lost":
            check = node_command(failure.host or "", "check-nodes", reached_by=reaching(typed_overrides(run_path)))
            return f"See what is left of the node with `{check}`; {again} On other nodes: `{resume} --hosts NODES`."
        case "port":
            chosen = "a free port is chosen, unless cluster.master_port names one"
            return f"See who listens there with `ss -ltnp`, and launch again: {chosen}."
        case "start":
            return f"Remove the reason that the message names; {again}"
        case "launcher":
            return f"Read {log}; {again}"
        case _:
            return f"The whole traceback is in {log}; {again}"


def _where(failure: Failure) -> Where:
    return "device" if failure.memory is not None and failure.memory.get("where") == "device" else "host"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
