"""Network interfaces, the one that nodes talk over, and the group `net` about it."""

from __future__ import annotations

import json
import shutil
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
DOCKER = link("docker0", "172.17.0.1/16", kind="bridge", state="DOWN")
DOCKER_BUSY = link("docker0", "172.17.0.1/16", kind="bridge")
CONTAINER_END = link("veth3f2a1b0", kind="veth", master="docker0")
VIRTUAL = link("virbr0", "192.168.122.1/24", kind="bridge")
RAILS = [link(f"ib{number}", f"10.10.{number}.1/24", link_type="infiniband", mtu=4092) for number in range(8)]
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
    "down": ([LO, link("eth0", "10.0.0.1/24", state="DOWN")], ["eth0"], NONE),
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
    down, part = link("eth1", "10.1.0.1/24", state="DOWN"), link("ens1", "10.2.0.1/24", master="bond0")
    choice = explain_interface(interfaces([LO, DOCKER_BUSY, CONTAINER_END, ETH0, down, part], ["eth0"]), wanted)
    assert choice.reason == reason
    assert (choice.interface is not None) == (wanted == "eth0")


def test_addresses_that_only_the_node_itself_reaches_are_left_out():
    inside = {"family": "inet", "local": "10.9.9.9", "prefixlen": 32, "scope": "host"}
    lo, eth0 = interfaces([LO, {**ETH0, "addr_info": [inside, *ETH0["addr_info"]]}], [])
    assert (lo.addresses, eth0.addresses) == ((), ("10.0.0.1/24",))


@pytest.mark.parametrize(
    "routes",
    [
        [default_route("eth2", metric=200), default_route("eth1", metric=100), default_route("eth0", metric=100)],
        [{"dst": "default", "nexthops": [{"dev": "eth0"}, {"dev": "eth1"}], "flags": []}],
        [default_route("eth0"), default_route("eth1"), default_route("eth2", table="100")],
    ],
)
def test_the_default_route_is_the_one_with_the_lowest_metric_and_counts_for_each_next_hop(routes: object):
    found = read(net_probe([LO, ETH0, ETH1, link("eth2", "10.2.0.1/24")], routes))
    assert [one.name for one in found.interfaces if one.is_default_route] == ["eth0", "eth1"]


def test_interfaces_with_a_gateway_are_found_in_routes_of_every_table():
    hops = [{"gateway": "10.3.0.1", "dev": "eth2"}, {"via": {"family": "inet6"}, "dev": "eth3"}, {"flags": ["dead"]}]
    routes = [
        {"dst": "10.1.0.0/16", "dev": "eth1"},
        default_route("eth0", table="100"),
        {"dst": "10.2.0.0/16", "nexthops": hops},
        {},
    ]
    assert read(net_probe([LO], routes)).gateways == {"eth0", "eth2", "eth3"}


def test_every_shell_and_every_tool_gives_the_same_answer(tmp_path: Path) -> None:
    real = shutil.which("ip")
    assert real is not None, "iproute2 is needed for this test"
    old = f'case "$1" in -json) echo "Option -json is unknown" >&2; exit 255;; esac; exec {real} "$@"'
    for name, text in (("old", old), ("none", "exit 127")):
        (tmp_path / name).mkdir()
        program(tmp_path / name, "ip", text)

    def ask(tools: str, *shell: str) -> NodeProbe:
        return ask_here(GROUP.questions, tmp_path, tools=tmp_path / tools / "bin", shell=shell)

    networks = [read(ask(*words)) for words in (("", "sh"), ("old", "sh"), ("none", "dash"), ("", "busybox", "sh"))]
    first, *others = [explain_interface(network.interfaces).interface for network in networks]
    assert first is not None
    assert [(one.name, one.addresses, one.mtu, one.is_default_route) for one in others if one] == 3 * [
        (first.name, first.addresses, first.mtu, first.is_default_route)
    ]
    assert all(first.name in network.gateways for network in networks)
    (tmp_path / "none/bin/python3").symlink_to("ip")
    assert ask("none", "sh").section("net.links").tool_missing


@pytest.mark.parametrize(
    "change",
    [
        {"state": SectionState.TIMED_OUT},
        *({"output": text} for text in ("", "[{", "{}", "[7]", '{"links": [], "routes": []}', "[" * 100000)),
        *(
            {"output": json.dumps({"links": [LO, {**ETH0, **odd}], "routes": [], **more})}
            for odd, more in (
                *(({"ifname": name}, {}) for name in ("a b", "eth0/../x", "", "x" * 16, None, "\x1b[1m")),
                ({"addr_info": [{"family": "inet", "local": "10.0.0.999", "prefixlen": 24}]}, {}),
                ({}, {"routes": [default_route("eth0", metric="x")]}),
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
