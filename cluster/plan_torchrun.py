"""The command that starts the ranks of one node of several.

The rendezvous is static because that of c10d numbers nodes as they come, and plans of attention rely on who lies where.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of all nodes meet: an address of the first node, and a port that is free there."""

    address: str
    port: int


@dataclass(frozen=True)
class RankProgram:
    """What every rank runs: `python -m module folder/config.yaml`; folder: of the run, on the node."""

    python: str
    module: str
    run_id: str
    folder: str


@dataclass(frozen=True)
class NodeSeat:
    """The part of a node: which of how many it is, its ranks, its own address, and where its output goes."""

    node_rank: int
    num_nodes: int
    local_ranks: int
    address: str
    log_dir: str


def torchrun_argv(program: RankProgram, seat: NodeSeat, rendezvous: Rendezvous) -> tuple[str, ...]:
    """torchrun for the ranks of one node, all of which start once every node is there."""
    return (
        program.python,
        *("-m", "torch.distributed.run"),
        f"--nnodes={seat.num_nodes}",
        f"--node-rank={seat.node_rank}",
        f"--nproc-per-node={seat.local_ranks}",
        "--max-restarts=0",
        "--rdzv-backend=static",
        f"--rdzv-id={program.run_id}",
        f"--master-addr={rendezvous.address}",
        f"--master-port={rendezvous.port}",
        f"--local-addr={seat.address}",
        f"--log-dir={seat.log_dir}/torchrun",
        *("-m", program.module),
        f"{program.folder}/config.yaml",
    )
