"""Facts from the answer of the real probe script, on this machine with the hardware of rehearsal nodes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from env_hardware import furnish, probe
from env_topologies import kept

from cluster.env.gather import read_facts
from cluster.env.plan import plan_environment
from cluster.errors import ClusterError
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, Section, SectionState
from engine.config.cluster import ClusterConfig

CONFIG = ClusterConfig()


def section(name: str, output: str, code: int | None = 0, state: SectionState = SectionState.ENDED) -> Section:
    return Section(name, output, code, state)


def with_sections(base: NodeProbe, *sections: Section) -> NodeProbe:
    return replace(base, sections={**base.sections, **{one.name: one for one in sections}})


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> NodeProbe:
    """What a healthy h100x8 answers to everything."""
    with pytest.MonkeyPatch.context() as patch:
        furnish(tmp_path_factory.mktemp("h100"), patch, "h100x8")
        return probe()


def asked_again(answer: NodeProbe, group: str) -> NodeProbe:
    """The answer with one group asked anew, for what a test has changed there."""
    return with_sections(answer, *probe(group).sections.values())


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return furnish(tmp_path, monkeypatch, "h100x8")


def test_a_node_is_planned_from_one_answer(answer: NodeProbe) -> None:
    facts = read_facts(NodeFacts(answer, CONFIG))
    assert len(facts.gpus) == 8
    assert facts.interface is not None
    assert facts.gateways is not None
    assert facts.notes == ()
    environment = plan_environment(facts, CONFIG)
    assert kept(environment) == [f"mlx5_{index}" for index in range(8)]
    assert [rail.port.device for rail in environment.rails] == [f"mlx5_{index}" for index in range(8)]


@pytest.mark.parametrize("name", ["ib.ports", "net.links", "net.route"])
@pytest.mark.parametrize("state", [SectionState.TIMED_OUT, SectionState.CUT_OFF, SectionState.MISSING])
def test_what_cannot_be_read_is_no_machine_without_infiniband(
    answer: NodeProbe, name: str, state: SectionState
) -> None:
    broken = with_sections(answer, section(name, "", None, state))
    with pytest.raises(ClusterError, match=f"{name}: {state.value}.*burst check-nodes --only ib,net"):
        read_facts(NodeFacts(broken, CONFIG))


def test_storage_is_found_in_mounts_with_the_way_to_it(answer: NodeProbe, h100: Path) -> None:
    (h100 / "proc").mkdir(exist_ok=True)
    (h100 / "proc" / "mounts").write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        "nas:/export /my\\040data nfs4 rw,vers=4.2,clientaddr=192.0.2.2,local_lock=none,addr=198.51.100.7 0 0\n"
        "198.51.100.9@tcp:/lustre /scratch lustre rw 0 0\n"
        "//198.51.100.11/share /win cifs rw 0 0\n"
        "bad$(touch\\040/tmp/x):/e /odd nfs rw 0 0\n"
        "127.0.0.1:/e /own nfs rw 0 0\n"
        "198.51.100.12:/e /volume fuse.glusterfs rw 0 0\n"
    )
    facts = read_facts(NodeFacts(asked_again(answer, "env"), CONFIG))
    assert facts.interface is not None
    assert [(one.mount_point, one.server, one.interface) for one in facts.storage] == [
        ("/my data", "198.51.100.7", facts.interface.name),
        ("/scratch", "198.51.100.9", facts.interface.name),
        ("/win", "198.51.100.11", facts.interface.name),
        ("/volume", "198.51.100.12", facts.interface.name),
    ]


def test_cores_are_those_of_the_machine_whatever_a_login_sets(
    answer: NodeProbe, h100: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) + 1))
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    assert read_facts(NodeFacts(asked_again(answer, "env"), CONFIG)).cores == len(os.sched_getaffinity(0))
    late = with_sections(answer, section("env.cores", "", None, SectionState.TIMED_OUT))
    assert read_facts(NodeFacts(late, CONFIG)).cores is None


def test_what_lies_below_a_bond_is_followed(answer: NodeProbe, h100: Path) -> None:
    (h100 / "sys/class/net/bond7").mkdir(parents=True)
    (h100 / "sys/class/net/bond7/lower_eth8").symlink_to("../eth8")
    facts = read_facts(NodeFacts(asked_again(answer, "env"), CONFIG))
    assert facts.carriers("bond7") == {"bond7", "eth8"}


def test_interfaces_with_a_gateway_are_found_in_every_kind_of_route(answer: NodeProbe) -> None:
    text = (
        "default via 10.0.0.254 dev eth0 proto dhcp\n10.1.0.0/16 dev eth1 scope link\nlocal 10.1.0.1 dev eth1\n"
        "10.2.0.0/16 proto static\n\tnexthop via 10.3.0.1 dev eth2 weight 1\n\tnexthop via inet6 fe80::1 dev eth3\n"
    )
    told = with_sections(answer, section("env.routes", text))
    assert read_facts(NodeFacts(told, CONFIG)).gateways == {"eth0", "eth2", "eth3"}
    late = with_sections(answer, section("env.routes", "", None, SectionState.TIMED_OUT))
    assert read_facts(NodeFacts(late, CONFIG)).gateways is None


def test_unknown_ways_to_storage_are_a_note(answer: NodeProbe) -> None:
    late = with_sections(answer, section("env.storage", "", None, SectionState.TIMED_OUT))
    told = "ports that lead to storage servers are not known: env.storage: timed out"
    assert read_facts(NodeFacts(late, CONFIG)).notes == (told,)


@pytest.mark.parametrize(
    ("peers", "driver", "symbols", "expected"),
    [
        (["/sys/module/nvidia_peermem/version"], "NVIDIA", False, True),
        ([], "NVIDIA UNIX Open Kernel Module", True, True),
        ([], "NVIDIA UNIX Open Kernel Module", None, True),  # the kernel hides its symbols
        ([], "NVIDIA UNIX Open Kernel Module", False, False),
        ([], "NVIDIA UNIX x86_64 Kernel Module", True, False),
    ],
)
def test_gpudirect_is_known_from_modules(
    answer: NodeProbe, peers: list[str], driver: str, symbols: bool | None, expected: bool
) -> None:
    told = {"peers": peers, "module": True, "driver": driver, "kernel": "6.1", "dmabuf": symbols}
    facts = read_facts(NodeFacts(with_sections(answer, section("ib.gpudirect", json.dumps(told))), CONFIG))
    assert facts.has_gpudirect is expected
    late = with_sections(answer, section("ib.gpudirect", "", None, SectionState.TIMED_OUT))
    assert read_facts(NodeFacts(late, CONFIG)).has_gpudirect is None
