"""What could not be seen never passes: every section of a healthy answer, damaged in every way, leaves no check OK that
rests on it, and all others as they were."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from testkit.check_fakes import changed_section, with_part
from testkit.fake_plan import run_config
from whole_node import CLUSTERS, changed, check, healthy, traits

from cluster.checks.check import Verdict
from cluster.checks.selection import GROUPS
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, SectionState


def names(group: str, checks: str) -> Set[str]:
    return {f"{group}.{name}" for name in checks.split()}


# Which checks rest on which section, and where other traits are lost than theirs: what a person would expect.
PORTS = names("ib", "count state rate pcie counters log gpudirect")
SMI = "nvidia_smi count model mig recovery ecc row_remap throttle power_limit clocks pcie busy fabric driver"
RESTS_ON: Mapping[str, Set[str]] = {
    "host.system": names("host", "disk shm memlock nofile memory_free"),
    "host.shared": {"host.shared"},
    "host.software": {"host.python"},
    "env_live": {"host.nccl_conf"},  # in a container the ranks see none of the node's files
    "host.docker": names("host", "docker docker_disk docker_gpu image"),
    "host.image": {"host.image", "host.image_nccl"},
    "host.image_files": {"host.image_nccl"},
    "ib.ports": PORTS,  # without them nobody knows whose log lines matter
    "ib.gpudirect": {"ib.gpudirect"},
    "net.links": {"net.interface"},
    "gpu.smi": names("gpu", f"{SMI} nvlink"),
    "gpu.lspci": {*PORTS, "gpu.count", "gpu.fabric"},  # which ports are for training is told by the GPUs beside them
    "gpu.nvlink": {"gpu.nvlink"},
    "kernel.log": {"gpu.xid", "ib.log"},
    "gpu.fabric_manager": {"gpu.fabric"},
    **{name: {name} for name in ("gpu.dcgm_health", "gpu.dcgm_diag")},
}
TRAITS: Mapping[str, Set[str]] = {
    "net.links": {"net.mtu"},
    "ib.ports": (told := names("ib", "link_layer rate count mtu")),
    "gpu.lspci": told,
    "gpu.smi": names("gpu", SMI),
    "bare host.software": {"host.versions"},
    "host.software": set(),
    "host.docker": set(),
    "host.image": {"host.versions"},
}
CASES = [
    *(("docker", section) for section in RESTS_ON if section != "env_live"),
    *(("bare", section) for section in ("host.software", "env_live")),
]
CONFIGS = {name: run_config(cluster=cluster).cluster for name, cluster in CLUSTERS.items()}
DAMAGES = ("late", "1", "127", "0 ", "0 sh: not found", "0 cores\\nkernel\\nmemlock\\nroot", f"0 {'x' * 5000}")
UNENDED = (SectionState.CUT_OFF, SectionState.MISSING)


def ok(probe: NodeProbe, name: str = "docker") -> set[str]:
    """Checks in which everything is OK."""
    findings = check(probe, CONFIGS[name])
    return {found.check for found in findings} - {one.check for one in findings if one.severity is not Verdict.OK}


def test_every_check_rests_on_a_section_of_the_table() -> None:
    assert set(RESTS_ON) <= set(healthy().sections)
    assert ok(healthy()) <= set[str]().union(*RESTS_ON.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_group_alone_is_asked_all_that_it_rests_on(name: str) -> None:
    whole = NodeFacts(healthy(), CONFIGS[name])
    for group in GROUPS:
        asked = {question.name: healthy().section(question.name) for question in group.questions}
        alone = NodeFacts(replace(healthy(), sections=asked), CONFIGS[name])
        assert (group.check(alone), group.told(alone)) == (group.check(whole), group.told(whole)), group.checks
        assert group.compare({"n1": alone}) == group.compare({"n1": whole})


@pytest.mark.parametrize(("name", "section"), CASES)
def test_a_damaged_section_leaves_no_ok_behind_and_the_others_as_they_were(name: str, section: str) -> None:
    before, compared = ok(healthy(), name), traits(healthy(), CONFIGS[name])
    assert before & RESTS_ON[section]
    lost = TRAITS.get(f"{name} {section}", TRAITS.get(section, RESTS_ON[section]))
    probes = {damage: changed(healthy(), f"{section}!{damage}") for damage in DAMAGES}
    probes |= {str(state): changed_section(healthy(), section, state=state, exit_code=None) for state in UNENDED}
    for damage, probe in probes.items():
        assert ok(probe, name) == before - RESTS_ON[section], damage
        told = traits(probe, CONFIGS[name])
        assert not {trait for trait in lost & told.keys() if told[trait] == compared[trait]}, damage
        assert {trait: told.get(trait) for trait in compared.keys() - lost} == {
            trait: compared[trait] for trait in compared.keys() - lost
        }, damage


@pytest.mark.parametrize(
    ("section", "old", "new", "lost"),
    [
        ("ib.ports", "Gb/sec", "Mb/sec", {"ib.rate"}),
        ("gpu.nvlink", "GB/s", "MB/s", {"gpu.nvlink"}),
        ("gpu.smi", " W<", " mW<", {"gpu.power_limit"}),
        ("gpu.smi", " MHz", " GHz", {"gpu.clocks"}),
        ("gpu.smi", r"(?<=\d)\.(?=\d\d W)", ",", {"gpu.power_limit"}),
        # What is no list is not an empty one.
        *(("ib.ports", r'"ports": \[.*\]', f'"ports": {value}', PORTS) for value in ("{}", '""', "null")),
        *(("net.links", r'"links": \[.*?\], "routes"', f'"links": {value}, "routes"', {"net.interface"})
          for value in ("{}", '""', "null", "[]", "[7]")),
        *(("net.links", r'"routes": \[.*\]', f'"routes": {value}', {"net.interface"})
          for value in ("{}", "null", '[["eth0", true, true, "x"]]')),
        *(("net.links", '"eth0"', value, {"net.interface"})
          for value in ('"a b"', '"eth0/../x"', '""', f'"{"x" * 16}"', "null", '"\\\\u001b[1m"')),
        ("net.links", "10.0.0.1/24", "10.0.0.999/24", {"net.interface"}),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_not_read(section: str, old: str, new: str, lost: Set[str]) -> None:
    text = healthy().section(section).output
    assert re.search(old, text)
    assert ok(healthy()) & lost
    assert not ok(changed_section(healthy(), section, output=re.sub(old, new, text))) & lost


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(CASES), st.floats(0, 1, exclude_max=True))
@example(("docker", "kernel.log"), 0.9921875)
def test_output_cut_at_any_place_leaves_no_ok_behind(case: tuple[str, str], share: float) -> None:
    name, section = case
    text = healthy().section(section).output
    cut = text[: int(len(text) * share)]
    if cut.strip() != text.strip():
        assert not ok(changed_section(healthy(), section, output=cut), name) & RESTS_ON[section]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(CASES), st.text(max_size=300), st.floats(0, 1), st.integers(0, 300))
def test_garbage_anywhere_breaks_no_check(case: tuple[str, str], garbage: str, share: float, length: int) -> None:
    name, section = case
    text = healthy().section(section).output
    place = int(len(text) * share)
    probe = changed_section(healthy(), section, output=text[:place] + garbage + text[place + length :])
    assert check(probe, CONFIGS[name])
    traits(probe, CONFIGS[name])


WORDS = st.sampled_from(["port", "broken", "mlx5_0", "1", "eth0", "0000:01:00.0", "0x030200"])
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(WORDS | st.text(max_size=2), inner, max_size=5),
    max_leaves=12,
)
JSON = [name for name in RESTS_ON if healthy().section(name).output[:1] in "[{" and "dcgm" not in name]


@settings(deadline=None, max_examples=80)
@example(section="host.software", turns=[], value=[])
@given(section=st.sampled_from(JSON), turns=st.lists(st.integers(0, 50), max_size=5), value=ODD)
def test_an_answer_of_any_shape_is_read_or_refused(section: str, turns: list[int], value: Any) -> None:
    """With any part of the document replaced."""
    document = with_part(healthy().section(section).document(), turns, value)
    probe = changed_section(healthy(), section, output=json.dumps(document))
    assert [one.observed for one in check(probe, CONFIGS["docker"]) if "the check broke" in one.observed] == []
    traits(probe)


FLOOD = [[1, "Xid (" * 2_000]] * 100


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("gpu.smi", "<?xml?>" + "<!DOCTYPE" * 100_000 + "</nvidia_smi_log>"),
        ("gpu.smi", "<nvidia_smi_log>" + "<a>" * 300_000 + "</nvidia_smi_log>"),
        ("gpu.smi", "<nvidia_smi_log>" + '<gpu id="x"/>' * 70_000 + "</nvidia_smi_log>"),
        ("kernel.log", json.dumps({"reader": "x", "total": 9, "boot": True, "uptime": 9, "seen": FLOOD})),
        ("gpu.nvlink", "GPU 0: x\n" + " " * 1_000_000),
        ("gpu.lspci", "pci\t" + "0000:" * 200_000),
        ("net.links", "[" * 100_000),
    ],
    ids=range(7),
)  # fmt: skip
def test_hostile_output_passes_nothing_and_takes_no_time(section: str, text: str) -> None:
    begin = time.process_time()
    hit = RESTS_ON[section] - {"ib.log"}  # no word of an adapter in that text
    assert not ok(changed_section(healthy(), section, output=text)) & hit
    assert time.process_time() - begin < 5


def test_every_element_of_a_gpu_is_optional() -> None:
    """Dropping any element of a whole answer breaks no check."""
    text = healthy("h100_550.xml").section("gpu.smi").output
    for tag in sorted(set(re.findall(r"<([a-z_]+)>", text)) - {"nvidia_smi_log", "gpu"}):
        smaller = re.sub(rf"<{tag}>.*?</{tag}>", "", text, flags=re.DOTALL)
        findings = check(changed_section(healthy(), "gpu.smi", output=smaller))
        assert [one for one in findings if "broke" in one.observed or one.observed.endswith("whole answer")] == [], tag
