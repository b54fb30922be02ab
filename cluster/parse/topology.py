"""The matrix of `nvidia-smi topo -m`: how near each GPU of a node is to each network adapter.

Older drivers name adapters in the header (`mlx5_0`); newer ones number them (`NIC0`) and name them in a legend below.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.errors import ClusterError
from cluster.remote_text import clean_text, one_line

_DEVICE = re.compile(r"GPU\d+|NIC\d+|[a-z][a-z0-9]*(?:_[A-Za-z0-9]+)+")
_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*")
_NVLINK = re.compile(r"NV\d+")
_TRAILING_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_MAX_DEVICES = 256


class TopologyError(ClusterError):
    """The text is no whole matrix of `nvidia-smi topo -m`."""


class Nearness(enum.IntEnum):
    """What lies between two devices; the smaller, the nearer."""

    SELF = 0
    NVLINK = 1
    PIX = 2  # at most one PCIe bridge
    PXB = 3  # several PCIe bridges, no host bridge
    PHB = 4  # a PCIe host bridge
    NODE = 5  # host bridges of one NUMA node
    SYS = 6  # another NUMA node


_WORDS = {"X": Nearness.SELF, "SOC": Nearness.SYS} | {near.name: near for near in Nearness if near >= Nearness.PIX}


@dataclass(frozen=True)
class GpuTopology:
    """One matrix. `gpus`: indices in its order. `adapters`: names as the kernel knows them (`mlx5_0`).

    nearness: (GPU index, adapter) -> Nearness. numa: GPU index -> NUMA node; a GPU without one is left out.
    """

    gpus: tuple[int, ...]
    adapters: tuple[str, ...]
    nearness: Mapping[tuple[int, str], Nearness] = field(default_factory=dict)
    numa: Mapping[int, int] = field(default_factory=dict)

    def between(self, gpu: int, adapter: str) -> Nearness | None:
        """How near they are; None when the matrix does not show one of them."""
        return self.nearness.get((gpu, adapter))


@dataclass(frozen=True)
class _Row:
    device: str
    cells: tuple[str, ...]  # one per column of the header
    rest: tuple[str, ...]  # affinities, as printed


def parse_topology(text: str) -> GpuTopology:
    """The matrix in the output of `nvidia-smi topo -m`, escape sequences and all.

    Raises TopologyError when it is cut off, damaged, or no matrix at all: half a matrix maps GPUs to wrong adapters.
    """
    lines = clean_text(text).splitlines()
    start, columns = _header(lines)
    rows = _rows(lines[start + 1 :], columns)
    _check_symmetry(rows, columns)
    names = _names(lines, columns)
    gpus = tuple(_gpu_index(name) for name in columns if name.startswith("GPU"))
    nearness: dict[tuple[int, str], Nearness] = {}
    numa: dict[int, int] = {}
    for row in rows:
        if not row.device.startswith("GPU"):
            continue
        index = _gpu_index(row.device)
        for column, cell in zip(columns, row.cells, strict=True):
            near = _nearness(row.device, column, cell)
            if not column.startswith("GPU") and near is not None:
                nearness[index, names[column]] = near
        if len(row.rest) > 1 and row.rest[1].isdecimal():
            numa[index] = int(row.rest[1])
    adapters = tuple(names[column] for column in columns if not column.startswith("GPU"))
    return GpuTopology(gpus, adapters, nearness, numa)


def _header(lines: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """(its line, the devices of its columns)."""
    for number, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) > 1 and not cells[0] and cells[1] == "GPU0":
            devices = [cell for cell in cells[1:] if cell and cell not in _TRAILING_COLUMNS]
            unknown = [cell for cell in devices if _DEVICE.fullmatch(cell) is None]
            if unknown or len(set(devices)) != len(devices) or len(devices) > _MAX_DEVICES:
                what = f"does not name devices: {one_line(unknown[0])!r}" if unknown else "repeats a device"
                raise TopologyError(f"nvidia-smi topo -m: the header {what}")
            return number, tuple(devices)
    shown = next((one_line(line, 80) for line in lines if line.strip()), "nothing")
    raise TopologyError(
        f"nvidia-smi topo -m: no header line that begins with a tab and GPU0; the output begins with {shown!r}"
    )


def _rows(lines: Sequence[str], columns: Sequence[str]) -> list[_Row]:
    rows: list[_Row] = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if len(rows) == len(columns) or not cells[0]:
            break
        expected = columns[len(rows)]
        if cells[0] != expected:
            break
        if len(cells) < len(columns) + 1 or not all(cells[1 : len(columns) + 1]):
            raise TopologyError(
                f"nvidia-smi topo -m: row {expected} has {sum(map(bool, cells[1:]))} cells for {len(columns)} devices; "
                f"the output is cut off or damaged"
            )
        rows.append(_Row(expected, tuple(cells[1 : len(columns) + 1]), tuple(cells[len(columns) + 1 :])))
    if len(rows) < len(columns):
        raise TopologyError(
            f"nvidia-smi topo -m: {len(rows)} rows for {len(columns)} devices; row {columns[len(rows)]} is missing"
        )
    return rows


def _check_symmetry(rows: Sequence[_Row], columns: Sequence[str]) -> None:
    for number, row in enumerate(rows):
        for other in range(number + 1):
            here, there = row.cells[other], rows[other].cells[number]
            if here != there or (other == number) != (here == "X"):
                raise TopologyError(
                    f"nvidia-smi topo -m: {row.device} to {columns[other]} is {one_line(here)!r} in one row "
                    f"and {one_line(there)!r} in the other; the output is damaged"
                )


def _names(lines: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    """The kernel's name of every adapter column."""
    found = (_LEGEND.fullmatch(line) for line in lines)
    legend = {match[1]: match[2] for match in found if match is not None}
    names: dict[str, str] = {}
    for column in columns:
        if column.startswith("GPU"):
            continue
        if column.startswith("NIC") and column not in legend:
            raise TopologyError(f"nvidia-smi topo -m: the NIC legend does not name {column}; the output is cut off")
        names[column] = legend.get(column, column)
    return names


def _nearness(row: str, column: str, cell: str) -> Nearness | None:
    """What the cell says; None for N/A."""
    if cell == "N/A":
        return None
    near = _WORDS.get(cell) or (Nearness.NVLINK if _NVLINK.fullmatch(cell) else None)
    if near is None and cell != "X":
        raise TopologyError(
            f"nvidia-smi topo -m: {row} to {column} is {one_line(cell, 40)!r}; expected X, NV#, PIX, ..., SYS"
        )
    return Nearness.SELF if near is None else near


def _gpu_index(name: str) -> int:
    return int(name.removeprefix("GPU"))
