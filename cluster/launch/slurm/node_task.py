"""The task of one node within a job: `python -m cluster.launch.slurm.node_task RUN TOKEN MODULE`.

It looks at its node, agrees with the others on where the ranks meet, writes down the plan of its node, and then is the
supervisor of the run there, whose ranks run MODULE. What goes wrong before is one line on stderr, which lies in the
job's log.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.agent.start import run_foreground
from cluster.agent.survey import find_port
from cluster.env.plan import FACT_QUESTIONS, check_network
from cluster.errors import ClusterError
from cluster.launch.local import local_facts
from cluster.launch.slurm.plan import look_again, node_folder, read_token, slurm_target, write_granted
from cluster.launch.slurm.sbatch import NOT_SHARED
from cluster.plan import LaunchPlan, NodePlan, node_spec, read_launch_plan
from cluster.plan_nodes import NodesBuilder, NodeTarget, Rendezvous
from cluster.ssh.hosts import is_host_name
from cluster.survey.facts import NodeFacts, survey_here
from engine.config.errors import BurstError
from engine.runs.files import read_json_object, replace_file, replace_json
from engine.runs.folder import RunFolder

MEETING_FILE = "rendezvous.json"  # of the run folder
_PROBE_S = 60.0
_MEETING_S = 300.0  # the first node may be long in its prolog
_STALE = ("supervisor.json", "outcome.json", "health.json", "stop.json", "stacks.json", "stacks_done.json", "lease")


@dataclass(frozen=True)
class SlurmTask:
    """Which node of the job this is, as Slurm tells it."""

    name: str
    rank: int
    num_nodes: int


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """The exit code of the node: that of its supervisor, or of what kept it from becoming one."""
    os.umask(0o077)
    run_path, token, module = Path(arguments[0]), arguments[1], arguments[2]
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    if read_token(run_path) != token:
        print(f"burst: {name} does not see the run folder {run_path} as the launcher does", file=sys.stderr)
        return NOT_SHARED
    try:
        place, plan = read_task(name, environment), read_launch_plan(run_path)
        if len(plan.nodes) != place.num_nodes:
            raise ClusterError(f"the job has {place.num_nodes} nodes, the plan {len(plan.nodes)}")
        facts = NodeFacts(survey_here(FACT_QUESTIONS, timeout_s=_PROBE_S), plan.config.cluster)
        check_network(facts)
        here = local_facts(plan.config)  # the batch file came here with folder and PYTHONPATH of the launcher
        site = replace(slurm_target(here, name, node_address(place, facts), run_path), facts=facts)
        node = prepare(plan, place, token, site, module)
    except (BurstError, OSError) as error:
        print(f"burst: {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    # A job belongs to Slurm, which bounds its time: it does not end with the launcher, so it needs no lease.
    return run_foreground(node_spec(plan, node, lease_s=None)._asdict())


def read_task(name: str, environment: Mapping[str, str]) -> SlurmTask:
    """Which node this is. Raises ClusterError where srun did not start this."""
    try:
        rank = int(environment["SLURM_NODEID"])
        num_nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment["SLURM_NNODES"])
    except (KeyError, ValueError) as error:
        raise ClusterError(f"not a task of srun: {error} is not set, or no number") from error
    if not is_host_name(name) or not 0 <= rank < num_nodes:
        raise ClusterError(f"Slurm calls this node {name!r}, number {rank} of {num_nodes}")
    return SlurmTask(name, rank, num_nodes)


def node_address(place: SlurmTask, facts: NodeFacts) -> str:
    """The IPv4 address at which other nodes reach this one. Raises ClusterError when there is none."""
    if place.num_nodes == 1:
        return "127.0.0.1"
    if (address := facts.interface.address) is None:
        text = f"no address for the other nodes: {facts.interface.reason}; set cluster.interface"
        raise ClusterError(text)
    return address


def prepare(plan: LaunchPlan, place: SlurmTask, token: str, site: NodeTarget, module: str) -> NodePlan:
    """The plan of this node, written down with its files. Raises ClusterError, OSError."""
    run = RunFolder(Path(plan.run_path))
    meeting = _agree(plan, place, token, site.address)
    builder = NodesBuilder(plan.config, plan.backend, run.run_id, place.num_nodes, module)
    node = builder.node(place.rank, site, meeting)
    folder = node_folder(run, node.name)
    for made in (folder, run.path / "env"):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _STALE:  # what a supervisor of an earlier attempt left: this one must not be taken for it
        (folder / name).unlink(missing_ok=True)
    replace_file(run.path / node.env_file, builder.environment_text(node))
    write_granted(run, node, token)
    return node


def _agree(plan: LaunchPlan, place: SlurmTask, token: str, address: str) -> Rendezvous:
    """Where the ranks meet: at the address of the first node, as the others read. Raises ClusterError in the end."""
    run_path = Path(plan.run_path)
    if place.rank == 0:
        meeting = Rendezvous(address, plan.config.cluster.master_port or find_port(None))
        replace_json(run_path / MEETING_FILE, {"token": token, **asdict(meeting)})
        return meeting
    deadline = time.monotonic() + _MEETING_S
    while time.monotonic() < deadline:
        look_again(run_path)
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = read_json_object(run_path / MEETING_FILE)
            if document is not None and document["token"] == token:
                return Rendezvous(str(document["address"]), int(document["port"]))
        time.sleep(0.1)
    raise ClusterError(f"the first node did not say within {_MEETING_S:g} s where the ranks meet")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
