"""What only a look at all nodes tells: who has less memory, who cannot hold the image, who lacks it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from cluster.checks.finding import Finding
from cluster.checks.report import Report, gib
from cluster.parse.host import Engine, Image, image_absent, parse_engine, parse_image, parse_memory
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

MEMORY_TOLERANCE = 0.03


def check_fleet(probes: Mapping[str, NodeProbe], config: ClusterConfig) -> list[Finding]:
    """Findings of group host that rest on several nodes."""
    return [*check_memory(probes), *check_image_room(probes, config), *check_image_presence(probes, config)]


def check_memory(probes: Mapping[str, NodeProbe]) -> list[Finding]:
    """host.memory: each node's main memory against the median; UNKNOWN for a node that did not tell.

    Kernels and firmware keep a little back, and not the same on equal machines: hence a tolerance, and no trait.
    """
    totals: dict[str, int] = {}
    for node, probe in probes.items():
        try:
            totals[node] = parse_memory(probe).total_bytes
        except UnreadableError:
            continue
    usual = statistics.median(totals.values()) if totals else 0.0
    return [_judge_memory(node, totals.get(node), usual, len(totals)) for node in probes]


def _judge_memory(node: str, total: int | None, usual: float, known: int) -> Finding:
    report = Report(node, "host.memory", f"{gib(usual)} within {MEMORY_TOLERANCE:.0%}" if known > 1 else "")
    if total is None:
        return report.unknown("the node did not tell how much memory it has", "run the check again")
    if abs(total - usual) > MEMORY_TOLERANCE * usual:
        remedy = "a module may be missing or switched off: `dmidecode -t memory`"
        return report.warn(f"{gib(total)}, the usual node has {gib(usual)}", remedy)
    return report.ok(gib(total))


def check_image_room(probes: Mapping[str, NodeProbe], config: ClusterConfig) -> list[Finding]:
    """host.docker_disk of nodes whose engine cannot take the image: twice its size without it, once beside it.

    Its size is known from any node that has it. Loading an image takes its layers once packed and once unpacked.
    """
    if config.container.runtime != "docker" or config.container.image is None:
        return []
    images = {node: _image(probe) for node, probe in probes.items()}
    size = max((image.size_bytes for image in images.values() if image is not None), default=0)
    found = []
    for node, probe in probes.items():
        engine = _engine(probe)
        needed = size if images[node] is not None else 2 * size
        if engine is not None and engine.room is not None and engine.room.free_bytes < needed:
            report = Report(node, "host.docker_disk", f"at least {gib(needed)} free for {config.container.image}")
            remedy = "remove images that nobody uses: `docker image prune -a`"
            found.append(report.on(engine.folder).fail(f"{gib(engine.room.free_bytes)} free", remedy))
    return found


def check_image_presence(probes: Mapping[str, NodeProbe], config: ClusterConfig) -> list[Finding]:
    """host.image of nodes that lack the image while others have it."""
    if config.container.runtime != "docker" or config.container.image is None:
        return []
    having = [node for node, probe in probes.items() if _image(probe) is not None]
    if not having:
        return []
    text = f"{config.container.image} is on {len(having)} of {len(probes)} nodes and not on this one"
    remedy = "distribute it with `burst image push`"
    return [Report(node, "host.image").fail(text, remedy) for node, probe in probes.items() if image_absent(probe)]


def _image(probe: NodeProbe) -> Image | None:
    try:
        return parse_image(probe)
    except UnreadableError:
        return None


def _engine(probe: NodeProbe) -> Engine | None:
    try:
        return parse_engine(probe)
    except UnreadableError:
        return None
