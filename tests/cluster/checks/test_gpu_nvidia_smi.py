"""`nvidia-smi -q -x` over generations of the driver, and everything else that the tool may say or not say."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rehearsal import check, fixture_text, healthy
from testkit.check_fakes import bad, changed_section
from testkit.check_fakes import ended as section_ended

from cluster.checks.finding import Verdict
from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import (
    GpuAddress,
    SmiFailure,
    SmiLog,
    SmiTrouble,
    parse_xml,
    read_pci_devices,
    read_smi,
)
from cluster.survey.section import NodeProbe, Section
from engine.config.cluster import ClusterConfig

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN


def ended(output: str, exit_code: int = 0) -> Section:
    return section_ended("gpu.smi", output, exit_code)


FIELDS = ("recovery", "ecc", "row_remap", "throttle", "power_limit", "clocks", "mig")


def judged(name: str) -> dict[str, tuple[Verdict, str]]:
    """What is said of the last GPU of a recorded form, of checks that rest on fields alone."""
    findings = check(NodeProbe("node1", {"gpu.smi": ended(fixture_text(name))}))
    return {one.check: (one.severity, one.observed) for one in findings if one.check.removeprefix("gpu.") in FIELDS}


def test_an_h100_with_driver_550_in_trouble() -> None:
    assert judged("h100_550.xml") == {
        "gpu.recovery": (FAIL, "the driver asks for: Reset"),
        "gpu.ecc": (FAIL, "SRAM error threshold exceeded"),
        "gpu.row_remap": (FAIL, "a row remapping failed"),
        "gpu.throttle": (FAIL, "slowed down: hw slowdown, hw power brake slowdown"),
        "gpu.power_limit": (WARN, "limited to 500 W"),
        "gpu.clocks": (WARN, "clocks set to 1500 MHz"),
        "gpu.mig": (OK, "MIG is off"),
    }


def test_an_a100_with_driver_470_uses_the_old_names() -> None:
    assert judged("a100_470.xml") == {
        "gpu.recovery": (SKIP, "not supported by this GPU"),
        "gpu.ecc": (FAIL, "1 uncorrectable ECC errors since the driver loaded"),
        "gpu.row_remap": (SKIP, "not supported by this GPU"),  # a literal N/A
        "gpu.throttle": (WARN, "slowed down: sw thermal slowdown"),
        "gpu.power_limit": (WARN, "limited to 350 W"),  # the enforced limit, not the one asked for
        "gpu.clocks": (OK, "up to 1410 MHz"),
        "gpu.mig": (OK, "MIG is off"),
    }


def test_an_h200_with_driver_570_uses_the_new_names() -> None:
    found = judged("h200_570.xml")
    assert found["gpu.recovery"] == (OK, "no reset is required")
    assert found["gpu.row_remap"] == (FAIL, "tpc repair pending: Yes")
    assert found["gpu.clocks"][0] is OK  # application clocks: "Requested functionality has been deprecated"


def test_fields_that_say_an_error_are_unreadable_never_zero() -> None:
    found = judged("h100_broken.xml")
    unknown = {"gpu.ecc", "gpu.row_remap", "gpu.throttle", "gpu.power_limit"}
    assert {name for name, (severity, _) in found.items() if severity is UNKNOWN} >= unknown


def test_a_process_that_calls_itself_an_error_breaks_no_gpu() -> None:
    text = fixture_text("h100_550.xml").replace("/opt/conda/bin/python3", "ERR!")
    assert ("gpu.nvidia_smi", "GPU 1", FAIL) not in bad(check(NodeProbe("node1", {"gpu.smi": ended(text)})))


def test_warnings_around_the_xml_are_told() -> None:
    note = "WARNING: infoROM is corrupted at gpu 0000:18:00.0"
    findings = check(NodeProbe("node1", {"gpu.smi": ended(f"{note}\n{fixture_text('h100_550.xml')}")}))
    assert (findings[0].severity, findings[0].evidence) == (WARN, note)


HEAD = "<?xml version='1.0'?>"
FAILURES = [
    ("Unable to determine the device handle for GPU0000:61:00.0: Unknown Error", 15, SmiFailure.GPU_LOST),
    ("Unable to determine the device handle for GPU 0000:61:00.0: GPU is lost.", 255, SmiFailure.GPU_LOST),
    ("Failed to initialize NVML: Driver/library version mismatch", 18, SmiFailure.FAILED),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, SmiFailure.NO_DRIVER),
    ("No devices were found", 6, SmiFailure.NO_DEVICES),
    ("Failed to initialize NVML: Unknown Error", 255, SmiFailure.FAILED),
    ("", 139, SmiFailure.FAILED),
    ("nvidia-smi: not found", 127, SmiFailure.NOT_INSTALLED),
    ("hello", 0, SmiFailure.FAILED),
    ("", 0, SmiFailure.FAILED),
    (f"{HEAD}<nvidia_smi_log><gpu", 0, SmiFailure.FAILED),
    (f"{HEAD}<nvidia_smi_log><gpu></nvidia_smi_log>", 0, SmiFailure.FAILED),
    (f"{HEAD}<nvidia_smi_log>&boom;</nvidia_smi_log>", 0, SmiFailure.FAILED),
    (f"{HEAD}<other><nvidia_smi_log></nvidia_smi_log></other>", 0, SmiFailure.FAILED),
    # An answer that ends in a complaint instead of its last line.
    (f"{HEAD}<nvidia_smi_log>\nUnable to determine the device handle", 0, SmiFailure.GPU_LOST),
]


@pytest.mark.parametrize(("said", "code", "failure"), FAILURES)
def test_each_failure_has_a_name_and_a_remedy(said: str, code: int, failure: SmiFailure) -> None:
    found = read_smi(ended(said, code))
    assert isinstance(found, SmiTrouble)
    assert found.failure is failure
    assert found.address == ("0000:61:00.0" if ":61:" in said else None)
    assert check(NodeProbe("node1", {"gpu.smi": ended(said, code)}))[0].remedy


@pytest.mark.parametrize(
    "head",
    [
        '<!DOCTYPE a [<!ENTITY lol "lol"><!ENTITY lol2 "&lol;&lol;&lol;">]>',
        '<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]>',
        '<!doctype a SYSTEM "x" [ <!ATTLIST a b CDATA "c"> ]>',
    ],
)
def test_xml_that_declares_anything_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match="entities"):
        parse_xml(f"{HEAD}{head}<a/>")


def test_every_element_of_a_gpu_is_optional() -> None:
    """Dropping any element of a whole answer breaks no check."""
    text = fixture_text("h100_550.xml")
    for tag in sorted(set(re.findall(r"<([a-z_]+)>", text)) - {"nvidia_smi_log", "gpu"}):
        smaller = ended(re.sub(rf"<{tag}>.*?</{tag}>", "", text, flags=re.DOTALL))
        assert isinstance(read_smi(smaller), SmiLog), tag
        broke = [one for one in check(NodeProbe("node1", {"gpu.smi": smaller})) if "broke" in one.observed]
        assert broke == [], tag


# Where GPUs and NVSwitches sit, by sysfs and by nvidia-smi.


def test_the_audio_function_of_a_gpu_is_no_gpu() -> None:
    row = ["0000:01:00.1", "0x040300", "", "/sys/devices/pci0000:00/0000:01:00.1"]
    devices = read_pci_devices(section_ended("gpu.lspci", json.dumps({"total": 5, "devices": [row]})))
    assert devices is not None
    assert (devices.gpus, devices.nvswitches, devices.total) == ((), 0, 5)


def test_gpu_addresses_come_from_sysfs_or_nvidia_smi_while_the_other_is_silent() -> None:
    def addresses(probe: NodeProbe) -> tuple[GpuAddress, ...]:
        return NodeFacts(probe, ClusterConfig()).gpu_addresses

    whole = addresses(healthy())
    assert addresses(changed_section(healthy(), "gpu.smi", exit_code=15)) == whole
    bare = tuple(replace(gpu, pci_path=gpu.pci_path[-1:], numa_node=None) for gpu in whole)
    assert addresses(changed_section(healthy(), "gpu.lspci", exit_code=1)) == bare
