"""Network interfaces, the one that nodes talk over, and the group `net` about it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from fabric_nodes import LO, default_route, link, net_probe
from rehearsal import program
from testkit.check_fakes import Groups, ask_here, changed_section

from cluster.checks.finding import Verdict
from cluster.survey.interfaces import LINKS, Network, explain_interface, read_network
from cluster.survey.section import NodeProbe, SectionState, UnreadableError
from engine.config.cluster import ClusterConfig

GROUP = Groups("net")
DOCKER_BUSY = link("docker0", "172.17.0.1/16", kind="bridge")
CONTAINER_END = link("veth3f2a1b0", kind="veth", master="docker0")
VIRTUAL = link("virbr0", "192.168.122.1/24", kind="bridge")
RAILS = [link(f"ib{number}", f"10.10.{number}.1/24", kind="infiniband", mtu=4092) for number in range(8)]
ETH0, ETH1 = link("eth0", "10.0.0.1/24"), link("eth1", "10.1.0.1/24")

NONE = "none of {0} has a link and an IPv4 address that others can reach"

# What fleets look like: interfaces, default routes, and which interface is the one, or why none is.
NODES = {
    "plain": ([LO, ETH0], ["eth0"], "eth0"),
    "docker beside it": ([LO, DOCKER_BUSY, CONTAINER_END, ETH0], ["eth0"], "eth0"),
    "docker and virtual machines, no default route": ([LO, DOCKER_BUSY, CONTAINER_END, VIRTUAL, ETH0], [], "eth0"),
    "eight InfiniBand interfaces and management": ([LO, *RAILS, ETH0], ["eth0"], "eth0"),
    "bond": (
        [LO, link("ens1", master="bond0"), link("ens2", master="bond0"), link("bond0", "10.0.0.1/16", kind="bond")],
        ["bond0"],
        "bond0",
    ),
    "bridge of a virtual machine host": (
        [LO, link("ens1", master="br0"), link("br0", "10.0.0.1/24", kind="bridge"), VIRTUAL],
        ["br0"],
        "br0",
    ),
    "VLAN on a bond": (
        [LO, link("bond0", kind="bond"), link("bond0.100", "10.1.0.1/24", kind="vlan")],
        ["bond0.100"],
        "bond0.100",
    ),
    "inside a network namespace": ([LO, link("eth0", "10.88.0.1/24", kind="veth")], [], "eth0"),
    "two candidates": ([LO, ETH0, ETH1], [], "{1} would do and none has the default route"),
    "two candidates, one with the default route": ([LO, ETH0, ETH1], ["eth1"], "eth1"),
    "bridge of its own beside it": ([LO, link("br0", "10.9.0.1/24", kind="bridge"), ETH0], [], "eth0"),
    "nothing but lo": ([LO], [], NONE),
    "docker alone": ([LO, DOCKER_BUSY], [], NONE),
    "default route over docker": ([LO, DOCKER_BUSY], ["docker0"], NONE),
    "down": ([LO, link("eth0", "10.0.0.1/24", up=False)], ["eth0"], NONE),
    "no IPv4": ([LO, link("eth0")], ["eth0"], NONE),
    "address of its own making": ([LO, link("eth0", "169.254.7.7/16")], [], NONE),
    "VPN has the default route": ([LO, link("tun0", "10.8.0.2/24", kind="tun"), ETH0], ["tun0"], "eth0"),
}


def read(probe: NodeProbe) -> Network:
    return read_network(probe.section(LINKS.name))


def interfaces(links: object, defaults: list[str]):
    return read(net_probe(links, [default_route(name) for name in defaults])).interfaces


@pytest.mark.parametrize("node", NODES)
def test_the_interface_that_nodes_talk_over_whatever_their_order(node: str):
    links, defaults, wanted = NODES[node]
    for ordered in (links, links[::-1]):
        found = interfaces(ordered, defaults)
        chosen = explain_interface(found)
        names = [", ".join(one.name for one in found if one.name not in left_out) for left_out in ((), ("lo",))]
        assert (chosen.interface.name if chosen.interface else chosen.reason) == wanted.format(*names)


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
def test_a_named_interface_is_taken_or_refused_with_the_reason(wanted: str, reason: str):
    down, part = link("eth1", "10.1.0.1/24", up=False), link("ens1", "10.2.0.1/24", master="bond0")
    choice = explain_interface(interfaces([LO, DOCKER_BUSY, CONTAINER_END, ETH0, down, part], ["eth0"]), wanted)
    assert choice.reason == reason
    assert (choice.interface is not None) == (wanted == "eth0")


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ([default_route("eth1", 200), default_route("eth0", 100)], ["eth0"]),
        ([default_route("eth1"), default_route("eth0")], ["eth0", "eth1"]),
        ([["eth1", False, True, 0], ["eth0", False, False, 0]], []),
    ],
)
def test_the_default_route_is_the_one_with_the_lowest_metric(routes: object, expected: list[str]):
    found = read(net_probe([LO, ETH0, ETH1], routes))
    assert [one.name for one in found.interfaces if one.is_default_route] == expected
    assert found.gateways >= {"eth1"}


def test_every_shell_tells_what_the_kernel_shows(tmp_path: Path) -> None:
    networks = [read(ask_here(GROUP.questions, tmp_path, shell=shell)) for shell in (("dash",), ("busybox", "sh"))]
    assert networks[0] == networks[1]
    told = json.loads(subprocess.run(["ip", "-json", "addr"], capture_output=True, check=True).stdout)
    first = {
        row["ifname"]: next(
            (f"{one['local']}/{one['prefixlen']}" for one in row["addr_info"] if one["family"] == "inet"), None
        )
        for row in told
    }
    found, chosen = (
        {one.name: one for one in networks[0].interfaces},
        explain_interface(networks[0].interfaces).interface,
    )
    assert chosen is not None
    assert (found["lo"].addresses[0], chosen.addresses[0]) == (first["lo"], first[chosen.name])
    program(tmp_path, "ip", "echo default via 10.1.0.254 dev eth1 table 101; echo local 10.2.0.1 dev eth2 table local")
    routed = read(ask_here(GROUP.questions, tmp_path, tools=tmp_path / "bin"))
    assert routed.gateways == {"eth1"} | networks[0].gateways  # of every table
    assert routed.interfaces == networks[0].interfaces
    program(tmp_path, "python3", "exit 127")
    assert ask_here(GROUP.questions, tmp_path, tools=tmp_path / "bin").section("net.links").tool_missing


@pytest.mark.parametrize(
    "change",
    [
        {"state": SectionState.TIMED_OUT},
        *({"output": text} for text in ("", "[{", "{}", "[7]", '{"links": [], "routes": []}', "[" * 100000)),
        *(
            {"output": json.dumps({"links": [LO, {**ETH0, **odd}], "routes": [], **more})}
            for odd, more in (
                *(({"name": name}, {}) for name in ("a b", "eth0/../x", "", "x" * 16, None, "\x1b[1m")),
                ({"addresses": ["10.0.0.999/24"]}, {}),
                ({}, {"routes": [["eth0", True, True, "x"]]}),
                ({}, {"routes": None}),
            )
        ),
    ],
)
def test_what_makes_no_sense_is_unreadable(change: dict[str, object]):
    probe = changed_section(net_probe([LO, ETH0], [default_route("eth0")]), "net.links", **change)
    with pytest.raises(UnreadableError):
        read(probe)


# The group.


@pytest.mark.parametrize(
    ("wanted", "severity", "observed", "mtu"),
    [
        (None, Verdict.OK, "eth0, 10.0.0.1/24", {"net.mtu": "1500"}),
        ("docker0", Verdict.FAIL, "docker0 (bridge) belongs to containers", {}),
        ("eth9", Verdict.FAIL, "there is no interface eth9", {}),
    ],
)
def test_a_node_has_an_interface_whose_mtu_is_that_of_the_others(
    wanted: str | None, severity: Verdict, observed: str, mtu: dict[str, str]
) -> None:
    probe, config = net_probe([LO, ETH0, DOCKER_BUSY], [default_route("eth0")]), ClusterConfig(interface=wanted)
    (found,) = GROUP.check(probe, config)
    assert (found.check, found.severity, found.observed.startswith(observed)) == ("net.interface", severity, True)
    assert GROUP.traits(probe, config) == mtu
