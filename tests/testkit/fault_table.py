"""THE table of faults: what is done to a launch, and how it then ends. docs/faults.md shows these very rows:

PYTHONPATH=.:tests python -m testkit.fault_table > docs/faults.md
"""

from __future__ import annotations

from dataclasses import dataclass

STOP_S = 15.0  # all processes of all nodes after the death of a rank, or after somebody asked
HANG_S = 60.0  # a hang named, with stacks, once nothing has been heard for cluster.hang_timeout_s
LEASE = ("cluster.lease_s=5",)
DETACHED = ("--detach",)


@dataclass(frozen=True)
class Row:
    """One fault of a launch of two ranks on two nodes. do: a fault of rank 1 or of node 2, else what the test does.

    blamed: how the reason begins, for a refused launch a part of what it says. limit_s: until nothing of it runs any
    more. words: settings and options of the launch. is_real: it is tried with torch, too.
    """

    fault: str
    do: str = ""
    state: str = "failed"
    exit_code: int | None = 1
    blamed: str = ""
    limit_s: float | None = STOP_S
    words: tuple[str, ...] = ()
    is_real: bool = False


def refused(fault: str, blamed: str, do: str = "", exit_code: int = 1, words: tuple[str, ...] = ()) -> Row:
    """A launch that starts nothing."""
    return Row(fault, do, "not started", exit_code, blamed, None, words)


def ended_well(fault: str, do: str, words: tuple[str, ...] = (), *, is_real: bool = False) -> Row:
    """A fault that a run survives."""
    return Row(fault, do, "completed", 0, "", None, words, is_real)


def cancelled(fault: str, do: str, words: tuple[str, ...] = ()) -> Row:
    """What somebody asked for."""
    return Row(fault, do, "cancelled", 130, "", STOP_S, words)


REFUSED = (
    refused("node unreachable", "does not answer", "link_down"),
    refused("connection refused", "refuses connections", "sshd_stop"),
    refused("sshd silent", "stays silent", "sshd_hang"),
    refused("login refused", "accepts none of our keys", "login_refused"),
    refused("host key changed", "host key is not the one that is known", "key_swap"),
    refused("disk of a node full", "0 MiB free under", "disk_full"),
    refused("no Python on the nodes", "cannot run /nowhere/python3", words=("cluster.python=/nowhere/python3",)),
    refused("interface missing", "there is no interface eth9", words=("cluster.interface=eth9",)),
    refused("data file missing", "no such file or folder", words=("data.paths=[/nonexistent/corpus.txt]",)),
    refused("bad override", "did you mean train.steps", exit_code=2, words=("train.stepz=3",)),
    refused("unknown model", "model has no option", exit_code=2, words=("model=llama9000",)),
    refused(
        "length that no method can divide", "6 ranks cannot divide 2 query heads evenly", exit_code=2,
        words=("attention=ulysses", "cluster.ranks_per_node=3"),
    ),
    refused(
        "more ranks than the method can use", "leave parallel.cp_size=null", exit_code=2, words=("parallel.cp_size=3",)
    ),
    refused(
        "no engine for containers", "expected an engine that answers",
        words=("cluster.container.runtime=docker", "cluster.container.image=a:1"),
    ),
    refused("port in use", "29555", "hold the port", words=("cluster.master_port=29555",)),
    refused("run folder cannot be written", "cannot be created", "put a file there"),
    refused("two launches at once", "holds it", "run another"),
)  # fmt: skip

ON_NODE_2 = "(rank 1 on node2)"
INJURIES = (
    Row("rank killed (SIGKILL)", "kill", blamed=f"signal SIGKILL {ON_NODE_2}", is_real=True),
    Row("rank crashes (SIGSEGV)", "segv", blamed=f"signal SIGSEGV {ON_NODE_2}"),
    Row("rank aborts (SIGABRT)", "abort", blamed=f"signal SIGABRT {ON_NODE_2}"),
    Row("rank exits with 0 too early", "exit0", blamed=f"exit EarlyExit {ON_NODE_2}"),
    Row("rank exits with 7", "exit7", blamed=f"exit SystemExit {ON_NODE_2}"),
    Row("rank raises", "raise", blamed=f"exception ValueError {ON_NODE_2}"),
    Row(
        "rank finds a mistake in the configuration", "config", exit_code=2,
        blamed=f"config engine.config.errors.ConfigError {ON_NODE_2}",
    ),
    Row("host memory ends", "oom_host", "oom", blamed=f"oom MemoryError {ON_NODE_2}"),
    Row("device memory ends", "oom_device", "oom", blamed=f"oom torch.OutOfMemoryError {ON_NODE_2}", is_real=True),
    Row("loss becomes NaN", "nan", blamed="user engine.config.errors.RunError", is_real=True),
    Row("disk full while recording", "disk", blamed="exception OSError (rank 0 on node1)", is_real=True),
    Row("rank hangs", "hang_sleep", blamed=f"hang Hang {ON_NODE_2}", limit_s=HANG_S, is_real=True),
    Row("rank hangs in native code", "hang_gil", blamed=f"hang Hang {ON_NODE_2}", limit_s=HANG_S, is_real=True),
    Row("rank stopped (SIGSTOP)", "stop", blamed=f"hang Hang {ON_NODE_2}", limit_s=HANG_S),
    ended_well("straggler", "slow", is_real=True),
    ended_well("log flood", "flood"),
    ended_well("log garbage", "garbage"),
)  # fmt: skip

AROUND_RANKS = (
    Row("torchrun killed", "kill torchrun", blamed="launcher LauncherDied (node2)"),
    Row("supervisor killed", "kill the supervisor", blamed="node_lost NodeLost (node2)"),
    Row("node restarts", "restart the node", blamed="node_lost NodeLost (node2)"),
    Row("link of a node cut", "cut the link", blamed="node_lost NodeLost (node2)", words=LEASE),
    ended_well("SSH sessions of a node killed", "kill SSH sessions"),
    ended_well("detached, SSH of all nodes gone for a minute", "take SSH away", DETACHED, is_real=True),
    ended_well("slow link", "slow the link"),
    cancelled("Ctrl-C", "SIGINT"),
    cancelled("SIGTERM", "SIGTERM"),
    cancelled("SIGHUP", "SIGHUP"),
    cancelled("Ctrl-C twice, a rank ignores it", "SIGINT twice"),
    cancelled("Ctrl-C three times, a node is cut off", "SIGINT thrice", LEASE),
    cancelled("burst cancel", "cancel"),
    Row("launcher killed", "kill the launcher", exit_code=None, blamed="launcher LauncherLost", words=LEASE),
    ended_well("launcher killed, then burst resume", "resume", is_real=True),
    ended_well("stdout closed", "close stdout"),
)
# What only ranks that speak with each other can show.
REAL_ONLY = (Row("partition between nodes", "partition", blamed="hang Hang", limit_s=HANG_S, is_real=True),)

RUNNING = (*INJURIES, *AROUND_RANKS, *REAL_ONLY)

HEAD = """\
# Faults, and what a run does about them

Every row is a launch of two ranks on two nodes that was injured on purpose, and what the tests hold it to: how run.json
says that it ended, who is blamed, the exit code of the launcher, and within what time after the fault no process of the
run is left on any node (after a hang: once no step was heard of for `cluster.hang_timeout_s`). Supervisors, signals and
processes are real, and so are sshd and links where the fault is of a node; rows with a star are also tried with
torchrun, torch and gloo. No row leaves a process, a container or a lock behind. Made from the table of the tests by
`python -m testkit.fault_table`.
"""


def document() -> str:
    """docs/faults.md."""
    return HEAD + _section("While it is launched", REFUSED) + _section("While it runs", RUNNING)


def _section(title: str, rows: tuple[Row, ...]) -> str:
    head = [f"\n## {title}\n", "| fault | run.json | blamed | exit code | ended within |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_line(row) for row in rows)]) + "\n"


def _line(row: Row) -> str:
    code = "–" if row.exit_code is None else row.exit_code
    limit = "–" if row.limit_s is None else f"{row.limit_s:g} s"
    cells = (row.fault + (" *" if row.is_real else ""), row.state, row.blamed or "–", code, limit)
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    print(document(), end="")
