"""Group `host`: the machine itself, without GPUs and networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster.checks import host_processes, host_room, host_software
from cluster.checks.finding import Finding
from cluster.checks.host_fleet import check_fleet, check_memory
from cluster.checks.host_software import nccl_trait
from cluster.checks.report import run_parts
from cluster.parse.host import (
    parse_engine,
    parse_image,
    parse_nccl_settings,
    parse_software,
)
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

__all__ = ["GROUP", "HostGroup", "check_fleet", "check_memory", "probe_settings"]

PARTS = (*host_room.PARTS, *host_processes.PARTS, *host_software.PARTS)


def probe_settings(config: ClusterConfig) -> dict[str, str]:
    """What host.sh must know of the configuration: variables to export, quoted, before its sections."""
    settings = {
        "BURST_RUNTIME": config.container.runtime,
        "BURST_PYTHON": config.python if config.container.runtime == "bare" else None,
        "BURST_ENGINE": config.container.command,
        "BURST_IMAGE": config.container.image,
        "BURST_SHARED_FOLDER": config.shared_folder,
    }
    return {name: value for name, value in settings.items() if value}


class HostGroup:
    """See `cluster.checks.finding.CheckGroup`."""

    name = "host"

    def check(self, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
        """Findings of one node."""
        return run_parts(PARTS, probe, config)

    def traits(self, probe: NodeProbe) -> Mapping[str, str]:
        """What must be the same everywhere: versions, NCCL settings and the image."""
        found = {name: _known(read, probe) for name, read in _TRAITS.items()}
        return {name: value for name, value in found.items() if value}


def _python(probe: NodeProbe) -> str | None:
    software = parse_software(probe)
    return None if software.in_image else software.python


def _torch(probe: NodeProbe) -> str | None:
    software = parse_software(probe)
    return None if software.in_image or software.packages is None else software.packages.get("torch")


def _nccl(probe: NodeProbe) -> str | None:
    software = parse_software(probe)
    return None if software.in_image else software.nccl


def _image(probe: NodeProbe) -> str | None:
    image = parse_image(probe)
    return None if image is None else image.identity


_TRAITS: Mapping[str, Callable[[NodeProbe], str | None]] = {
    "host.python": _python,
    "host.torch": _torch,
    "host.nccl": _nccl,
    "host.nccl_conf": lambda probe: nccl_trait(parse_nccl_settings(probe)),
    "host.docker": lambda probe: parse_engine(probe).version,
    "host.image": _image,
}


def _known(read: Callable[[NodeProbe], str | None], probe: NodeProbe) -> str | None:
    try:
        return read(probe)
    except UnreadableError:
        return None


GROUP = HostGroup()
