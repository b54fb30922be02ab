"""Group `ib`: adapters for training, by what /sys and the kernel log say; no tool of InfiniBand is needed.

What cannot be read is UNKNOWN, and a check that looked at no port is never OK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster.checks.finding import Finding, Verdict
from cluster.checks.ib_health import check_counters, check_gpudirect, check_kernel
from cluster.checks.ib_links import (
    check_count,
    check_gid,
    check_mtu,
    check_pcie,
    check_rate,
    check_state,
)
from cluster.checks.ib_ports import ETHERNET, ComputePorts, choose_compute_ports
from cluster.checks.profile import profile_findings
from cluster.checks.report import Report
from cluster.parse.infiniband import Adapters, parse_adapters
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig, ExpectedHardware

_PORT_CHECKS: Mapping[str, Callable[[Report, ComputePorts], list[Finding]]] = {
    "ib.state": check_state,
    "ib.rate": check_rate,
    "ib.mtu": check_mtu,
    "ib.pcie": check_pcie,
}
_OTHER_CHECKS = ("ib.counters", "ib.flaps", "ib.health", "ib.gpudirect")


class InfinibandGroup:
    """See `cluster.checks.finding.CheckGroup`."""

    name = "ib"

    def check(self, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
        """Findings about the adapters of one node; one SKIP where there are none and none are expected."""
        try:
            adapters = parse_adapters(probe.section("ib.ports"))
        except UnreadableError as error:
            return [
                Report(probe.node, check).unknown(str(error), "run the check again; see the evidence", error.evidence)
                for check in ("ib.count", *_PORT_CHECKS, *_OTHER_CHECKS)
            ]
        compute = choose_compute_ports(adapters, config.expected)
        if not compute.ports and not config.expected.hcas and not _is_broken(adapters):
            why = "; ".join(f"{name} {reason}" for name, reason in list(compute.reasons.items())[:4])
            return [Report(probe.node, "ib.count").skip(f"no adapter for training{f': {why}' if why else ''}")]
        findings = check_count(Report(probe.node, "ib.count"), compute, adapters, config.expected)
        for name, run in _PORT_CHECKS.items():
            findings += run(Report(probe.node, name), compute)
        if any(port.link_layer == ETHERNET for port in compute.ports):
            findings += check_gid(Report(probe.node, "ib.gid"), compute)
        findings += check_counters(Report(probe.node, "ib.counters"), compute, probe.section("ib.counters"))
        findings += check_kernel(probe.node, compute, probe.section("ib.kernel"))
        return findings + check_gpudirect(Report(probe.node, "ib.gpudirect"), adapters, probe.section("ib.gpudirect"))

    def traits(self, probe: NodeProbe) -> Mapping[str, str]:
        """What all nodes must have alike: link layer and MTU. Count and rate: see `check_fleet`."""
        try:
            active = choose_compute_ports(parse_adapters(probe.section("ib.ports")), ExpectedHardware()).active
        except UnreadableError:
            return {}
        values: dict[str, list[object]] = {
            "ib.link_layer": [port.link_layer or None for port in active],
            "ib.mtu": [port.netdev_mtu for port in active],
        }
        # A port that does not tell leaves the trait out: what the others have is not what the node has.
        told = {check: found for check, found in values.items() if found and None not in found}
        return {check: ", ".join(sorted({str(value) for value in found})) for check, found in told.items()}


GROUP = InfinibandGroup()


def _is_broken(adapters: Adapters) -> bool:
    return bool(adapters.portless or adapters.driverless_paths)


def check_fleet(probes: Mapping[str, NodeProbe], config: ClusterConfig) -> list[Finding]:
    """Nodes with another number or rate of ports than most have, where the configuration does not say the right one."""
    traits: dict[str, dict[str, str]] = {}
    for node, probe in probes.items():
        try:
            compute = choose_compute_ports(parse_adapters(probe.section("ib.ports")), config.expected)
        except UnreadableError:
            continue  # its own checks are UNKNOWN
        traits[node] = {}
        if config.expected.hcas is None:
            traits[node]["ib.count"] = str(len(compute.active))
        if compute.rate_gbps is not None:
            traits[node]["ib.rate"] = f"{compute.rate_gbps:g}"
    compared = profile_findings(traits, ExpectedHardware())
    return [finding for finding in compared if finding.severity in (Verdict.WARN, Verdict.FAIL)]
