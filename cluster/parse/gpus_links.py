"""Links between GPUs: `nvidia-smi nvlink` and `nvidia-smi topo -p2p`, and the daemon that sets NVSwitches up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.parse.nvidia_smi import MAX_GPUS
from cluster.probe.section import Section
from cluster.remote_text import one_line

_TITLE = re.compile(r"GPU (\d{1,3}): .*")
_LINK = re.compile(r"\s*Link (\d{1,3}): (?:(\d+(?:\.\d+)?) GB/s|<?inactive>?)", re.IGNORECASE)
_ALL_DOWN = re.compile(r"unable to retrieve nvlink information", re.IGNORECASE)
_CELL = re.compile(r"X|OK|CNS|GNS|TNS|NS|U|DR|DIS|N/A")


@dataclass(frozen=True)
class GpuLinks:
    """NVLinks of one GPU: link -> GB/s in one direction, None when inactive. all_down: it says that none is up."""

    links: Mapping[int, float | None]
    all_down: bool = False

    @property
    def active(self) -> tuple[int, ...]:
        """Links that carry data."""
        return tuple(link for link, speed in self.links.items() if speed is not None)

    @property
    def inactive(self) -> tuple[int, ...]:
        """Links that are there and down."""
        return tuple(link for link, speed in self.links.items() if speed is None)


def read_nvlinks(section: Section) -> Mapping[int, GpuLinks] | None:
    """Links by index of the GPU; None when the answer cannot be believed. A GPU without links has none."""
    blocks = _blocks(section)
    if blocks is None:
        return None
    found = {}
    for index, lines in blocks.items():
        links: dict[int, float | None] = {}
        for line in lines:
            match = _LINK.fullmatch(line)
            if match:
                links[int(match.group(1))] = float(match.group(2)) if match.group(2) else None
            elif not _ALL_DOWN.search(line):
                return None
        found[index] = GpuLinks(links, any(_ALL_DOWN.search(line) for line in lines))
    return found


def read_p2p(section: Section) -> Mapping[tuple[int, int], str] | None:
    """Whether GPU i reaches GPU j over NVLink, (i, j) -> OK, NS, ...; None when the matrix is not whole."""
    if not section.ok:
        return None
    columns: list[int] | None = None
    cells = {}
    for line in section.output.splitlines():
        words = line.split()
        if columns is None:
            if words and all(re.fullmatch(r"GPU\d{1,3}", word) for word in words):
                columns = [int(word[3:]) for word in words]
                if len(set(columns)) != len(columns) or len(columns) > MAX_GPUS:
                    return None
        elif words and re.fullmatch(r"GPU\d{1,3}", words[0]):
            if len(words) != len(columns) + 1 or not all(_CELL.fullmatch(word) for word in words[1:]):
                return None
            row = int(words[0][3:])
            cells.update({(row, column): word for column, word in zip(columns, words[1:], strict=True)})
        elif words and words[0].startswith("Legend"):
            break
    if columns is None or set(cells) != {(row, column) for row in columns for column in columns}:
        return None
    return {pair: word for pair, word in cells.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class FabricManager:
    """unit: what systemd says (active, failed, ...), None without systemd. version: of the daemon, None if not told."""

    unit: str | None
    is_running: bool
    version: str | None = None


def read_fabric_manager(section: Section) -> FabricManager | None:
    """The daemon's state; None when neither systemd nor the list of processes could be read."""
    if not section.ok:
        return None
    values: dict[str, str] = {}
    for line in section.output.splitlines():
        key, _, value = line.partition("\t")
        values.setdefault(key, one_line(value))
    if not re.fullmatch(r"[1-9]\d* end", values.get("scanned", "")):
        return None
    version = re.search(r"\d+\.\d+(\.\d+)*", values.get("version", ""))
    unit = values.get("unit")
    # `systemctl is-active` prints one word; anything else is a complaint of its own, such as "no bus".
    unit = unit if unit is not None and re.fullmatch(r"[a-z-]+", unit) else None
    return FabricManager(unit, "process" in values, version.group() if version else None)


def _blocks(section: Section) -> Mapping[int, list[str]] | None:
    """Lines below each `GPU n:` title, blank ones left out; None for an answer that is no such list."""
    if not section.ok:
        return None
    blocks: dict[int, list[str]] = {}
    current: list[str] | None = None
    for line in section.output.splitlines():
        if not line.strip():
            continue
        title = _TITLE.fullmatch(line)
        if title:
            current = blocks.setdefault(int(title.group(1)), [])
        elif current is None:
            return None
        else:
            current.append(line)
    return blocks
