"""One machine under two names is found by its boot id and network namespace, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testkit.check_fakes import FakeFleet, answer, ask_here, only
from whole_node import BY_HAND

from cluster.checks.check import FleetReport, Selection, Verdict
from cluster.checks.groups.net import GROUPS, MACHINE
from cluster.checks.run import CheckOptions, check_nodes
from cluster.survey.network import LINKS, read_network
from engine.config.cluster import ClusterConfig

BOOT = "b48f1472-d2b0-429b-a183-6599eedfcd47"
OTHER = "0c0ffee0-d2b0-429b-a183-6599eedfcd47"
HOST, CONTAINER = "net:[4026531833]", "net:[4026532411]"


def checked(*machines: str) -> FleetReport:
    """The report on nodes n1, n2, ... that say they are these machines."""
    told = [{LINKS.name: json.dumps({**BY_HAND[LINKS.name], "machine": machine})} for machine in machines]
    fleet = FakeFleet({f"n{number}": answer(sections) for number, sections in enumerate(told, 1)})
    options = CheckOptions(GROUPS, Selection((MACHINE,)), connect=fleet.connect)
    return check_nodes(fleet.hosts, ClusterConfig(), options)


def test_second_name_of_one_machine_is_refused() -> None:
    report = checked(f"{BOOT} {HOST}", f"{OTHER} {HOST}", f"{BOOT} {HOST}")
    assert {name: one.verdict for name, one in report.nodes.items() if not one.usable} == {"n3": Verdict.FAIL}
    assert only(report.nodes["n3"].findings, MACHINE).observed == "n3 and n1 are the same machine"


@pytest.mark.parametrize(
    "second",
    [
        f"{BOOT} {CONTAINER}",  # a container, or a testbed's node, on the machine of the first
        f"{OTHER} {HOST}",  # a clone of its image: /etc/machine-id is the same, the boot is not
        "",  # the kernel hides it, as gVisor does
    ],
)
def test_nodes_that_are_not_known_to_be_one_machine_pass(second: str) -> None:
    assert checked(f"{BOOT} {HOST}", second).usable == ("n1", "n2")


@pytest.mark.needs("user namespaces")
def test_namespace_of_the_network_tells_nodes_of_one_kernel_apart(tmp_path: Path) -> None:
    shells = (("sh",), ("sh",), ("unshare", "--map-root-user", "--net", "sh"))
    here, again, inside = (
        read_network(ask_here([LINKS], tmp_path, shell=shell).section(LINKS.name)).machine for shell in shells
    )
    assert here == again, "one machine differs from itself"
    assert here != inside, "a network namespace of its own is taken for the same node"
