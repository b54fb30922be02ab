"""`nvidia-smi -q -x` of several generations becomes values; what cannot be read never becomes one."""

from __future__ import annotations

import re

import pytest
from gpu_rehearsal import ended, fixture_text, healthy

from cluster.parse.nvidia_smi import Gpu, SmiFailure, SmiLog, SmiTrouble, read_smi
from cluster.parse.nvidia_smi_xml import MAX_DEPTH, Gap, normal_address, parse_xml
from cluster.probe.section import Section, SectionState


def read(name: str) -> SmiLog:
    log = read_smi(ended(fixture_text(name)))
    assert isinstance(log, SmiLog)
    return log


def trouble(section: Section) -> SmiTrouble:
    found = read_smi(section)
    assert isinstance(found, SmiTrouble)
    return found


@pytest.fixture(scope="module")
def h100() -> tuple[Gpu, ...]:
    return read("h100_550.xml").gpus


def test_h100_with_driver_550_is_read_field_by_field(h100: tuple[Gpu, ...]) -> None:
    gpu = h100[0]
    assert (gpu.index, gpu.address, gpu.model) == (0, "0000:18:00.0", "NVIDIA H100 80GB HBM3")
    assert gpu.used_mib == 1
    assert (gpu.pcie.width, gpu.pcie.width_max, gpu.pcie.generation) == (16, 16, 5)
    assert (gpu.ecc.mode, gpu.ecc.volatile_uncorrectable, gpu.ecc.aggregate_sram_uncorrectable) == ("Enabled", 0, 0)
    assert (gpu.remap.remapped, gpu.remap.pending, gpu.remap.failure) == (2, "No", "No")
    assert (gpu.throttle, gpu.recovery_action, gpu.fabric_state) == (0x1, "None", "Completed")
    assert (gpu.power_limit_w, gpu.power_default_w, gpu.clocks.sm_max) == (700, 700, 1980)
    assert gpu.processes == ()
    assert gpu.broken == ()


def test_h100_in_trouble_is_read_field_by_field(h100: tuple[Gpu, ...]) -> None:
    gpu = h100[1]
    assert gpu.ecc.volatile_uncorrectable == 1 + 2 + 4
    assert (gpu.ecc.aggregate_sram_uncorrectable, gpu.ecc.sram_threshold_exceeded) == (3, "Yes")
    assert (gpu.remap.pending, gpu.remap.failure, gpu.remap.remapped) == ("Yes", "Yes", 4)
    assert gpu.throttle == 0x4 | 0x8 | 0x80
    assert (gpu.recovery_action, gpu.fabric_state, gpu.pcie.width) == ("Reset", "In Progress", 8)
    assert (gpu.power_limit_w, gpu.clocks.application, gpu.clocks.application_default) == (500, 1500, 1980)
    assert isinstance(gpu.processes, tuple)
    assert (gpu.processes[0].pid, gpu.processes[0].kind, gpu.processes[0].used_mib) == (2503421, "C", 70204)


def test_a100_with_driver_470_uses_the_old_names() -> None:
    (gpu,) = read("a100_470.xml").gpus
    assert gpu.throttle == 0x1 | 0x20
    assert (gpu.power_limit_w, gpu.power_default_w) == (350, 400)  # the enforced limit, not the one asked for
    assert (gpu.ecc.volatile_uncorrectable, gpu.ecc.aggregate_sram_uncorrectable, gpu.ecc.pending) == (1, 5, "Disabled")
    assert gpu.recovery_action is Gap.MISSING
    assert gpu.ecc.sram_threshold_exceeded is Gap.MISSING


def test_literal_na_of_remapped_rows_is_not_supported() -> None:
    (gpu,) = read("a100_470.xml").gpus
    assert {gpu.remap.remapped, gpu.remap.pending, gpu.remap.failure} == {Gap.NOT_SUPPORTED}


def test_h200_with_driver_570_uses_the_new_names() -> None:
    log = read("h200_570.xml")
    (gpu,) = log.gpus
    assert (log.driver, log.attached) == ("570.172.08", 1)
    assert (gpu.recovery_action, gpu.performance_state) == ("None", "P8")
    assert gpu.remap.repairs == ("tpc repair pending: Yes",)
    assert gpu.clocks.application is Gap.NOT_SUPPORTED  # "Requested functionality has been deprecated"


def test_fields_that_say_an_error_are_unreadable_never_zero() -> None:
    (gpu,) = read("h100_broken.xml").gpus
    values = [gpu.used_mib, gpu.pcie.width, gpu.throttle, gpu.ecc.volatile_uncorrectable]
    values += [gpu.remap.pending, gpu.power_limit_w, gpu.processes, gpu.performance_state]
    assert set(values) == {Gap.UNREADABLE}
    assert "used: ERR!" in gpu.broken
    assert "gpu_temp: GPU is lost" in gpu.broken


def test_a_process_that_calls_itself_an_error_breaks_no_gpu(h100: tuple[Gpu, ...]) -> None:
    text = fixture_text("h100_550.xml").replace("/opt/conda/bin/python3", "ERR!")
    log = read_smi(ended(text))
    assert isinstance(log, SmiLog)
    assert log.gpus[1].broken == ()


@pytest.mark.parametrize("profile", ["h100x8", "a100x8", "h200x8"])
def test_every_value_of_a_fake_gpu_is_known(profile: str) -> None:
    log = read_smi(healthy(profile).section("gpu.smi"))
    assert isinstance(log, SmiLog)
    assert len(log.gpus) == 8
    assert Gap.MISSING not in {gpu.recovery_action for gpu in log.gpus} | {gpu.throttle for gpu in log.gpus}
    assert len({gpu.uuid for gpu in log.gpus}) == 8


def test_warnings_around_the_xml_are_kept() -> None:
    text = f"WARNING: infoROM is corrupted at gpu 0000:18:00.0\n{fixture_text('h100_550.xml')}"
    log = read_smi(ended(text))
    assert isinstance(log, SmiLog)
    assert log.notes == ("WARNING: infoROM is corrupted at gpu 0000:18:00.0",)


@pytest.mark.parametrize(
    ("said", "code", "failure"),
    [
        ("Unable to determine the device handle for GPU0000:61:00.0: Unknown Error", 15, SmiFailure.GPU_LOST),
        ("Unable to determine the device handle for GPU 0000:61:00.0: GPU is lost.", 255, SmiFailure.GPU_LOST),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, SmiFailure.MISMATCH),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, SmiFailure.NO_DRIVER),
        ("No devices were found", 6, SmiFailure.NO_DEVICES),
        ("Failed to initialize NVML: Unknown Error", 255, SmiFailure.FAILED),
        ("", 139, SmiFailure.FAILED),
        ("nvidia-smi: not found", 127, SmiFailure.NOT_INSTALLED),
        ("hello", 0, SmiFailure.NOT_XML),
        ("", 0, SmiFailure.NOT_XML),
        ("<?xml version='1.0'?><nvidia_smi_log><gpu", 0, SmiFailure.CUT_OFF),
        ("<?xml version='1.0'?><nvidia_smi_log><gpu></nvidia_smi_log>", 0, SmiFailure.NOT_XML),
        ("<?xml version='1.0'?><other><nvidia_smi_log></nvidia_smi_log></other>", 0, SmiFailure.NOT_XML),
        # An answer that ends in a complaint instead of its last line.
        ("<?xml version='1.0'?><nvidia_smi_log>\nUnable to determine the device handle", 0, SmiFailure.GPU_LOST),
    ],
)
def test_each_failure_has_a_name(said: str, code: int, failure: SmiFailure) -> None:
    assert trouble(ended(said, code)).failure is failure


def test_the_lost_gpu_is_named_by_its_address() -> None:
    said = "Unable to determine the device handle for GPU0000:61:00.0: Unknown Error"
    assert trouble(ended(said, 15)).address == "0000:61:00.0"


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        (SectionState.TIMED_OUT, SmiFailure.NO_ANSWER),
        (SectionState.MISSING, SmiFailure.NO_ANSWER),
        (SectionState.CUT_OFF, SmiFailure.CUT_OFF),
    ],
)
def test_a_whole_document_in_a_section_that_did_not_end_is_not_believed(
    state: SectionState, failure: SmiFailure
) -> None:
    section = Section("gpu.smi", fixture_text("h100_550.xml"), None, state)
    assert trouble(section).failure is failure


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
        parse_xml(f'<?xml version="1.0"?>{head}<a/>')


def test_the_document_type_line_of_the_real_tool_is_fine() -> None:
    assert parse_xml('<?xml version="1.0" ?><!DOCTYPE a SYSTEM "nvsmi_device_v12.dtd"><a/>').tag == "a"


def test_deep_xml_is_refused() -> None:
    parse_xml("<a>" * MAX_DEPTH + "</a>" * MAX_DEPTH)
    with pytest.raises(ValueError, match="nests"):
        parse_xml("<a>" * (MAX_DEPTH + 1) + "</a>" * (MAX_DEPTH + 1))


def test_an_unknown_entity_is_no_crash() -> None:
    assert trouble(ended("<?xml version='1.0'?><nvidia_smi_log>&boom;</nvidia_smi_log>")).failure is SmiFailure.NOT_XML


@pytest.mark.parametrize("cut", range(40, 16000, 397))
def test_a_document_cut_anywhere_is_never_read(cut: int) -> None:
    text = fixture_text("h100_550.xml").strip()
    assert trouble(ended(text[: min(cut, len(text) - 1)])).failure is SmiFailure.CUT_OFF


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("PCI:0000:0f:00", "0000:0f:00.0"),
        ("0000:0f:00 GPU-I:05", "0000:0f:00.0"),
        ("GPU0000:61:00.0: Unknown Error", "0000:61:00.0"),
        ("0008:01:00.3", "0008:01:00.3"),
        ("12:34:56", None),
    ],
)
def test_addresses_are_spelled_as_in_sysfs(text: str, address: str | None) -> None:
    assert normal_address(text) == address


def test_every_element_of_a_gpu_is_optional() -> None:
    """Dropping any element of a whole answer never raises, and never invents a number."""
    text = fixture_text("h100_550.xml")
    for tag in sorted(set(re.findall(r"<([a-z_]+)>", text)) - {"nvidia_smi_log", "gpu"}):
        smaller = re.sub(rf"<{tag}>.*?</{tag}>", "", text, flags=re.DOTALL)
        assert isinstance(read_smi(ended(smaller)), SmiLog | SmiTrouble), tag
