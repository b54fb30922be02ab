"""What could not be seen never passes: every section of healthy answers, damaged in every way, leaves no check OK that
rests on it, and all others as they were."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

import host_sections
import pytest
import rehearsal
from fabric_nodes import LO, FabricNode, default_route, link, net_probe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from testkit.check_fakes import Groups, changed_section

from cluster.checks.finding import Finding, Verdict
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, Section, SectionState
from engine.config.cluster import ClusterConfig

# Which checks rest on which section. Nothing of these tables is known to the code: they say what a person would expect.
HOST = {
    "host.system": {"host.disk", "host.shm", "host.memlock", "host.nofile", "host.memory_free"},
    "host.shared": {"host.shared"},
    "host.software": {"host.python"},
    "env_live": {"host.nccl_conf"},
    "host.docker": {"host.docker", "host.docker_disk", "host.docker_gpu", "host.image"},
    "host.image": {"host.image"},
}
FABRIC = {
    # Without the ports nobody knows whose log lines matter.
    "ib.ports": {f"ib.{name}" for name in ("count", "state", "rate", "pcie", "counters", "log", "gpudirect")},
    "kernel.log": {"ib.log"},
    "ib.gpudirect": {"ib.gpudirect"},
    "net.links": {"net.interface"},
}
# Which ports are for training is told by the GPUs beside them.
FABRIC["gpu.lspci"] = FABRIC["ib.ports"]
GPU = {
    "gpu.smi": {
        *("gpu.nvidia_smi", "gpu.count", "gpu.model", "gpu.mig", "gpu.recovery", "gpu.ecc", "gpu.row_remap"),
        *(
            "gpu.throttle",
            "gpu.power_limit",
            "gpu.clocks",
            "gpu.pcie",
            "gpu.busy",
            "gpu.nvlink",
            "gpu.fabric",
            "gpu.driver",
        ),
    },
    "gpu.lspci": {"gpu.count", "gpu.fabric"},
    "gpu.nvlink": {"gpu.nvlink"},
    "kernel.log": {"gpu.xid"},
    "gpu.fabric_manager": {"gpu.fabric"},
    "gpu.dcgm_health": {"gpu.dcgm_health"},
    "gpu.dcgm_diag": {"gpu.dcgm_diag"},
}
# Where other traits of the node than its checks' are lost.
TRAITS: Mapping[str, Set[str]] = {
    "net.links": {"net.mtu"},
    "ib.ports": {"ib.link_layer", "ib.rate", "ib.count"},
    "gpu.lspci": {"ib.link_layer", "ib.rate", "ib.count"},
    "gpu.smi": GPU["gpu.smi"] - {"gpu.nvlink"},
    "host.software": set(),
    "bare host.software": {"host.versions"},
    "host.docker": set(),
    "host.image": {"host.versions"},
}


@dataclass(frozen=True)
class Node:
    """A healthy answer, who judges it, and what rests on its sections."""

    probe: NodeProbe
    groups: tuple[Groups, ...]
    rests_on: Mapping[str, Set[str]]
    config: ClusterConfig

    def check(self, probe: NodeProbe) -> list[Finding]:
        return [finding for group in self.groups for finding in group.check(probe, self.config)]

    def traits(self, probe: NodeProbe) -> dict[str, str]:
        return {trait: value for group in self.groups for trait, value in group.traits(probe, self.config).items()}

    def ok(self, probe: NodeProbe) -> set[str]:
        """Checks in which everything is OK."""
        findings = self.check(probe)
        return {found.check for found in findings} - {
            found.check for found in findings if found.severity is not Verdict.OK
        }


@functools.cache
def node(name: str) -> Node:
    if name == "docker":
        return Node(host_sections.healthy(), (Groups("host"),), HOST, host_sections.DOCKER)
    if name == "bare":
        bare = host_sections.healthy(software=host_sections.BARE_SOFTWARE)
        return Node(bare, (Groups("host"),), HOST, host_sections.BARE)
    if name == "fabric":
        network = net_probe([LO, link("eth0", "10.0.0.1/24")], [default_route("eth0")])
        adapters = FabricNode.healthy().probe()
        probe = replace(adapters, sections={**adapters.sections, **network.sections})
        return Node(probe, (Groups("ib"), Groups("net")), FABRIC, ClusterConfig())
    return Node(rehearsal.healthy(name), (Groups("gpu"),), GPU, ClusterConfig())


TABLES = {"fabric": FABRIC, "h100x8": GPU, "docker": HOST}
CASES = [*((name, section) for name, table in TABLES.items() for section in table), ("bare", "host.software")]


def with_output(name: str, section: str, output: str) -> NodeProbe:
    return changed_section(node(name).probe, section, output=output)


@pytest.mark.parametrize("name", ["docker", "fabric", "h100x8"])
def test_every_check_rests_on_a_section_of_the_tables(name: str) -> None:
    one = node(name)
    assert set(one.rests_on) <= set(one.probe.sections)
    assert one.ok(one.probe) <= set[str]().union(*one.rests_on.values())


@pytest.mark.parametrize("name", ["docker", "bare", "fabric", "h100x8"])
def test_a_group_alone_is_asked_all_that_it_rests_on(name: str) -> None:
    one = node(name)
    whole = NodeFacts(one.probe, one.config)
    for group in (group for groups in one.groups for group in groups.all):
        asked = {question.name: one.probe.section(question.name) for question in group.questions}
        alone = NodeFacts(replace(one.probe, sections=asked), one.config)
        assert (group.check(alone), group.told(alone)) == (group.check(whole), group.told(whole)), group.checks
        assert group.compare({"n1": alone}) == group.compare({"n1": whole})


def in_state(state: SectionState) -> Callable[[Section], Section]:
    return lambda section: replace(section, state=state, exit_code=None)


def ended_with(code: int) -> Callable[[Section], Section]:
    return lambda section: replace(section, exit_code=code)


def saying(output: str) -> Callable[[Section], Section]:
    return lambda section: replace(section, output=output)


LOG = {"reader": "dmesg", "total": 9, "boot": True, "uptime": 9.0}
DAMAGES: Mapping[str, Callable[[Section], Section]] = {
    **{state.value: in_state(state) for state in SectionState if state is not SectionState.ENDED},
    **{f"exit {code}": ended_with(code) for code in (1, 127)},
    "empty": saying(""),
    "no such tool": saying("sh: not found"),
    "keys alone": saying("cores\nkernel\nmemlock\nroot"),
    "flood": saying("x" * 5000),
}


@pytest.mark.parametrize(("name", "section"), CASES)
def test_a_damaged_section_leaves_no_ok_behind_and_the_others_as_they_were(name: str, section: str) -> None:
    one, healthy = node(name), node(name).ok(node(name).probe)
    assert healthy & one.rests_on[section]
    whole = one.probe.section(section)
    probes = {
        damage: replace(one.probe, sections={**one.probe.sections, section: apply(whole)})
        for damage, apply in DAMAGES.items()
    }
    left = healthy - one.rests_on[section]
    assert {damage: one.ok(probe) for damage, probe in probes.items()} == dict.fromkeys(DAMAGES, left)
    lost, traits = TRAITS.get(f"{name} {section}", TRAITS.get(section, one.rests_on[section])), one.traits(one.probe)
    for damage, probe in probes.items():
        told = one.traits(probe)
        assert {trait for trait in lost & told.keys() if told[trait] == traits[trait]} == set(), damage
        assert {trait: value for trait, value in told.items() if trait not in lost} == {
            trait: value for trait, value in traits.items() if trait not in lost
        }, damage


@pytest.mark.parametrize(
    ("name", "section", "old", "new", "lost"),
    [
        ("fabric", "ib.ports", "Gb/sec", "Mb/sec", {"ib.rate"}),
        ("h100x8", "gpu.nvlink", "GB/s", "MB/s", GPU["gpu.nvlink"]),
        ("h100x8", "gpu.smi", " W<", " mW<", {"gpu.power_limit"}),
        ("h100x8", "gpu.smi", " MHz", " GHz", {"gpu.clocks"}),
        ("h100x8", "gpu.smi", r"(?<=\d)\.(?=\d\d W)", ",", {"gpu.power_limit"}),
    ],
)
def test_another_unit_or_decimal_comma_is_not_read(name: str, section: str, old: str, new: str, lost: Set[str]) -> None:
    text = node(name).probe.section(section).output
    assert re.search(old, text)
    assert node(name).ok(node(name).probe) - node(name).ok(with_output(name, section, re.sub(old, new, text))) >= lost


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(CASES), st.floats(0, 1, exclude_max=True))
@example(("fabric", "kernel.log"), 0.9921875)
def test_output_cut_at_any_place_leaves_no_ok_behind(case: tuple[str, str], share: float) -> None:
    name, section = case
    text = node(name).probe.section(section).output
    cut = text[: int(len(text) * share)]
    if cut.strip() != text.strip():
        assert not node(name).ok(with_output(name, section, cut)) & node(name).rests_on[section]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(CASES), st.text(max_size=300), st.floats(0, 1), st.integers(0, 300))
def test_garbage_anywhere_breaks_no_check(case: tuple[str, str], garbage: str, share: float, length: int) -> None:
    name, section = case
    text = node(name).probe.section(section).output
    place = int(len(text) * share)
    probe = with_output(name, section, text[:place] + garbage + text[place + length :])
    assert node(name).check(probe)
    node(name).traits(probe)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("gpu.smi", "<?xml?>" + "<!DOCTYPE" * 100_000 + "</nvidia_smi_log>"),
        ("gpu.smi", "<nvidia_smi_log>" + "<a>" * 300_000 + "</nvidia_smi_log>"),
        ("gpu.smi", "<nvidia_smi_log>" + '<gpu id="x"/>' * 70_000 + "</nvidia_smi_log>"),
        ("kernel.log", json.dumps({**LOG, "seen": [[1, "Xid (" * 2_000]] * 100})),
        ("gpu.nvlink", "GPU 0: x\n" + " " * 1_000_000),
        ("gpu.lspci", "pci\t" + "0000:" * 200_000),
    ],
    ids=lambda value: value if value.startswith(("gpu.", "kernel.")) else value[:20].split("\t")[0],
)
def test_hostile_output_passes_nothing_and_takes_no_time(section: str, text: str) -> None:
    begin = time.process_time()
    asked = {"gpu.xid"} if section == "kernel.log" else GPU[section]  # no word of an NVSwitch in that text
    assert not node("h100x8").ok(with_output("h100x8", section, text)) & asked
    assert time.process_time() - begin < 5
