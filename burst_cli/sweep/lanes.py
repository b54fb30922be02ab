"""Where the cells of a sweep run at the same time: disjoint sets of nodes of equal size. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from burst_cli.sweep.runner import Lane
from engine.errors import ConfigError


def node_lanes(names: Sequence[str], parallel: int) -> tuple[tuple[str, ...], ...]:
    """`names` cut into `parallel` runs of neighbours of equal size. Raises ConfigError when that leaves a rest."""
    if parallel < 1 or len(names) % parallel:
        legal = ", ".join(str(number) for number in range(1, len(names) + 1) if len(names) % number == 0)
        raise ConfigError(
            f"--parallel {parallel}: {len(names)} nodes cannot be divided into equal parts; legal values: {legal}"
        )
    size = len(names) // parallel
    return tuple(tuple(names[first : first + size]) for first in range(0, len(names), size))


def choose_lanes(names: Sequence[str], parallel: int, *, gpus: int = 0, is_slurm: bool = False) -> tuple[Lane, ...]:
    """The lanes of a sweep on the nodes `names`; without names on this machine, or as jobs of Slurm."""
    if names:
        return tuple(
            Lane(",".join(part), (f"cluster.nodes='{','.join(part)}'",)) for part in node_lanes(names, parallel)
        )
    if parallel > 1 and gpus and not is_slurm:
        raise ConfigError(
            f"--parallel {parallel}: cells at the same time would share the {gpus} GPUs of this machine; "
            "name nodes with cluster.nodes, or leave it out"
        )
    where = "Slurm" if is_slurm else "this machine"
    return tuple(Lane(where if parallel == 1 else f"{where} {number}") for number in range(1, parallel + 1))
