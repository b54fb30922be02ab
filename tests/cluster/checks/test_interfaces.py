"""Which network interface nodes talk over, and why."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from testkit.check_fakes import ask_here, ended
from whole_node import ETH0, LO, link

from cluster.survey.network import LINKS, Network, explain_interface, read_network

DOCKER = link("docker0", "172.17.0.1/16", kind="bridge")
CONTAINER_END = link("veth3f2a1b0", kind="veth", master="docker0")
VIRTUAL = link("virbr0", "192.168.122.1/24", kind="bridge")
RAILS = [link(f"ib{number}", f"10.10.{number}.1/24", kind="infiniband", mtu=4092) for number in range(8)]
ETH1 = link("eth1", "10.1.0.1/24")
BOND = [link("ens1", master="bond0"), link("ens2", master="bond0"), link("bond0", "10.0.0.1/16", kind="bond")]
BRIDGE = [link("ens1", master="br0"), link("br0", "10.0.0.1/24", kind="bridge"), VIRTUAL]
VLAN = [link("bond0", kind="bond"), link("bond0.100", "10.1.0.1/24", kind="vlan")]
DOWN = link("eth1", "10.1.0.1/24", up=False)
NONE = "none of lo, {} has a link and an IPv4 address that others can reach"


def read(links: object, routes: object = ()) -> Network:
    return read_network(ended(LINKS.name, json.dumps({"links": links, "routes": routes})))


@pytest.mark.parametrize(
    ("links", "default", "chosen"),
    [
        ([ETH0], "eth0", "eth0"),
        ([DOCKER, CONTAINER_END, ETH0], "eth0", "eth0"),
        ([DOCKER, CONTAINER_END, VIRTUAL, ETH0], "", "eth0"),
        ([*RAILS, ETH0], "eth0", "eth0"),
        (BOND, "bond0", "bond0"),
        (BRIDGE, "br0", "br0"),
        (VLAN, "bond0.100", "bond0.100"),
        ([link("eth0", "10.88.0.1/24", kind="veth")], "", "eth0"),  # inside a network namespace
        ([ETH0, ETH1], "", "{} would do and none has the default route"),
        ([ETH0, ETH1], "eth1", "eth1"),
        ([link("br0", "10.9.0.1/24", kind="bridge"), ETH0], "", "eth0"),
        ([DOCKER], "", NONE),
        ([DOCKER], "docker0", NONE),
        ([link("eth0", "10.0.0.1/24", up=False)], "eth0", NONE),
        ([link("eth0")], "eth0", NONE),
        ([link("eth0", "169.254.7.7/16")], "", NONE),
        ([link("tun0", "10.8.0.2/24", kind="tun"), ETH0], "tun0", "eth0"),
    ],
)
def test_the_interface_that_nodes_talk_over_whatever_their_order(links: list[Any], default: str, chosen: str) -> None:
    for ordered in (links, links[::-1]):
        found = explain_interface(read([LO, *ordered], [[default, True, True, 0]] if default else []).interfaces)
        names = ", ".join(one["name"] for one in ordered)
        assert (found.interface.name if found.interface else found.reason) == chosen.format(names)


@pytest.mark.needs("user namespaces", "ip")
def test_all_addresses_of_an_interface_are_read(tmp_path: Path) -> None:
    # In a network namespace of its own; what `ip` lists is the oracle.
    adding = " && ".join(f"ip address add {one} dev lo" for one in ("169.254.7.7/16", "10.0.0.5/24"))
    shell = ("unshare", "--map-root-user", "--net", "sh", "-c", f"{adding} && ip link set lo up && exec sh -s")
    shown = ["unshare", "--map-root-user", "--net", "sh", "-c", f"{adding} && ip link set lo up && ip -4 -o address"]
    listed = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    (lo,) = read_network(ask_here([LINKS], tmp_path, shell=shell).section(LINKS.name)).interfaces
    assert sorted(lo.addresses) == sorted(re.findall(r"inet (\S+)", listed))


@pytest.mark.needs("user namespaces", "ip")
def test_ipv6_addresses_that_others_can_reach_are_read(tmp_path: Path) -> None:
    # In a network namespace of its own, where lo has ::1, too, of which other nodes have no use.
    adding = "ip link set lo up && ip -6 address add fd00::5/64 dev lo nodad"
    shell = ("unshare", "--map-root-user", "--net", "sh", "-c", f"{adding} && exec sh -s")
    (lo,) = read_network(ask_here([LINKS], tmp_path, shell=shell).section(LINKS.name)).interfaces
    assert lo.ipv6_addresses == ("fd00::5/64",)


@pytest.mark.parametrize("wanted", [None, "eth0"])
def test_a_node_with_ipv6_alone_is_refused_by_that_name(wanted: str | None) -> None:
    alone = link("eth0") | {"ipv6_addresses": ["fd00::5/64"]}
    choice = explain_interface(read([LO, alone]).interfaces, wanted)
    assert choice.interface is None
    assert "eth0 has IPv6 addresses alone (fd00::5/64), but ranks meet over IPv4" in choice.reason


@pytest.mark.parametrize("addresses", [("169.254.7.7/16", "10.0.0.5/24"), ("10.0.0.5/24", "169.254.7.7/16")])
def test_address_that_the_interface_gave_itself_is_passed_over(addresses: tuple[str, str]) -> None:
    choice = explain_interface(read([LO, link("eth0", *addresses)], [["eth0", True, True, 0]]).interfaces)
    assert choice.address == "10.0.0.5", choice.reason


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("eth0", "named by cluster.interface"),
        ("eth9", "there is no interface eth9; there are lo, docker0, veth3f2a1b0, eth0, eth1, ens1"),
        ("lo", "lo does not leave the machine"),
        ("docker0", "docker0 (bridge) belongs to containers or virtual machines on this node"),
        ("veth3f2a1b0", "veth3f2a1b0 (veth) belongs to containers or virtual machines on this node"),
        ("eth1", "eth1 is down"),
        ("ens1", "ens1 is a part of bond0"),
    ],
)
def test_a_named_interface_is_taken_or_refused_with_the_reason(wanted: str, reason: str) -> None:
    links = [LO, DOCKER, CONTAINER_END, ETH0, DOWN, link("ens1", "10.2.0.1/24", master="bond0")]
    choice = explain_interface(read(links, [["eth0", True, True, 0]]).interfaces, wanted)
    assert (choice.reason, choice.interface is not None) == (reason, wanted == "eth0")


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ([["eth1", True, True, 200], ["eth0", True, True, 100]], ["eth0"]),
        ([["eth1", True, True, 0], ["eth0", True, True, 0]], ["eth0", "eth1"]),
        ([["eth1", False, True, 0], ["eth0", False, False, 0]], []),
    ],
)
def test_the_default_route_is_the_one_with_the_lowest_metric(routes: object, expected: list[str]) -> None:
    found = read([LO, ETH0, ETH1], routes)
    assert [one.name for one in found.interfaces if one.is_default_route] == expected
    assert found.gateways >= {"eth1"}
