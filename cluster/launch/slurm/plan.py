"""The plan of a launch through Slurm. Which nodes it gets is told when it gets them, so there are two steps.

`build_slurm_plan`, on the launcher, before: an entry per node under a name that only stands for it, and the batch file.
`cluster.launch.slurm.node_task`, on each node, then: its own command and environment, which `granted_plan` puts into
the plan.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.launch.slurm.sbatch import SCRIPT_FILE, TOKEN_FILE, check_slurm_settings, sbatch_text
from cluster.plan import (
    TRAINER_MODULE,
    LaunchPlan,
    MachineFacts,
    NodePlan,
    assemble_plan,
    plan_from_dict,
    with_files,
    with_ranks,
)
from cluster.plan_nodes import NodesBuilder, NodeTarget, Rendezvous
from cluster.ssh.hosts import parse_nodes, slurm_nodes
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.files import read_json_object, replace_json
from engine.runs.folder import RunFolder

GRANTED_FILE = "granted.json"
_MAX_BYTES = 1 << 20


def build_slurm_plan(
    config: RunConfig,
    facts: MachineFacts,
    run_path: Path,
    *,
    module: str = TRAINER_MODULE,
    environment: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """The plan to run `config` on nodes that Slurm will choose, in the run folder `run_path`, which they see, too.

    facts: of this machine, whose Python and folders the nodes share. environment: of this process; where it shows an
    allocation, its nodes are used. Raises ConfigError when a setting cannot be given to Slurm.
    """
    check_slurm_settings(config.cluster)
    cluster, slurm, num_nodes = config.cluster, config.cluster.slurm, _num_nodes(config, environment)
    asked_gpus = cluster.ranks_per_node or 1 if cluster.backend == "nccl" else 0
    gpus = slurm.gpus_per_node if slurm.gpus_per_node is not None else asked_gpus
    node = MachineFacts("a node of Slurm", 1, gpus)
    threads = cluster.threads_per_rank  # which follow from cores, of which the nodes tell
    config, backend = with_ranks(config, node, launcher="slurm", num_nodes=num_nodes, threads_per_rank=threads)
    builder = NodesBuilder(config, backend, run_path.name, num_nodes, module)
    meeting = Rendezvous("FIRST_ADDRESS", cluster.master_port or 0)
    # What stands for nodes that are not known yet.
    sites = [slurm_target(facts, f"slurm-node{rank}", "ITS_ADDRESS", run_path) for rank in range(num_nodes)]
    nodes = [builder.node(rank, site, meeting) for rank, site in enumerate(sites)]
    script = (SCRIPT_FILE, sbatch_text(config, facts, run_path, module))
    return assemble_plan("slurm", config, run_path, nodes, backend, script)


def slurm_target(facts: MachineFacts, name: str, address: str, run_path: Path) -> NodeTarget:
    """A node of which no more is known; it shares storage with the machine of `facts`."""
    return NodeTarget(name, address, str(run_path), facts.python, facts.python_path, facts.cwd)


def _num_nodes(config: RunConfig, environment: Mapping[str, str]) -> int:
    cluster, granted = config.cluster, slurm_nodes(environment)
    num_nodes = 1 if granted is None else len(granted.names)
    if cluster.num_nodes is not None:
        num_nodes = cluster.num_nodes
    elif cluster.nodes is not None:
        num_nodes = len(parse_nodes(cluster.nodes, "cluster.nodes").names)
    if granted is not None and num_nodes > len(granted.names):
        raise ConfigError(f"cluster.num_nodes={num_nodes}, but this allocation of Slurm has {len(granted.names)} nodes")
    return num_nodes


def write_granted(run: RunFolder, node: NodePlan, token: str) -> None:
    """Leave the plan of a node in its folder. Raises OSError."""
    replace_json(node_folder(run, node.name) / GRANTED_FILE, {"token": token, "node": node.to_dict()})


def granted_plan(plan: LaunchPlan, run: RunFolder, token: str) -> LaunchPlan | None:
    """`plan` with the nodes that it got in the attempt `token`, its file launch.json alone; None until all are there.

    Raises PlanFileError when what they wrote makes no plan.
    """
    look_again(run.path / "nodes")
    found: list[dict[str, Any]] = []
    for path in (run.path / "nodes").glob(f"*/{GRANTED_FILE}"):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = read_json_object(path) if path.stat().st_size <= _MAX_BYTES else None
            if document and document.get("token") == token and isinstance(document.get("node"), dict):
                found.append(document["node"])
    if len(found) < len(plan.nodes):
        return None
    nodes = sorted(found, key=lambda node: str(node.get("node_rank")).zfill(9))
    return with_files(plan_from_dict({**plan.to_dict(), "nodes": nodes, "files": {}}))


def node_folder(run: RunFolder, name: str) -> Path:
    """nodes/<name> of the run folder."""
    return run.path / "nodes" / run.log_dir(name).name


def look_again(folder: Path) -> None:
    """Make a network file system ask its server: what is not there may have been remembered for a minute."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        next(entries, None)


def read_token(run_path: Path) -> str | None:
    """The token of the newest attempt that was given to Slurm."""
    look_again(run_path)
    try:
        return (run_path / TOKEN_FILE).read_text().strip()
    except (OSError, ValueError):
        return None
