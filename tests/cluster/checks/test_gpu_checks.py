"""Every rule of the group gpu, just below, at and above its limit, on an otherwise healthy node."""

from __future__ import annotations

import json
import re

import pytest
from rehearsal import GPU as GROUP
from rehearsal import check, fixture_text, healthy, with_text
from testkit.check_fakes import bad, changed_section, ended, only
from testkit.check_fakes import told as in_words

from cluster.checks.finding import Verdict
from cluster.survey.section import NodeProbe, Section
from engine.config.cluster import ClusterConfig, ExpectedHardware

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN
GPU0, ALL_GPUS = "GPU 0", [f"GPU {index}" for index in range(8)]


def told(probe: NodeProbe, field: str, value: str) -> NodeProbe:
    """`probe` where the first element of `SECTION:AFTER>TAG` says `value`; TAG*: all of them."""
    section, _, place = field.rpartition(":")
    after, _, tag = place.rpartition(">")
    name, count = tag.removesuffix("*"), 0 if tag.endswith("*") else 1
    text = probe.section(section or "gpu.smi").output
    start = text.index(f"<{after}>") if after else 0
    tail, changed = re.subn(rf"<{name}>[^<]*</{name}>", f"<{name}>{value}</{name}>", text[start:], count=count)
    assert changed, field
    return changed_section(probe, section or "gpu.smi", output=text[:start] + tail)


def verdict(probe: NodeProbe, name: str) -> Verdict:
    return only(check(probe), name).severity


FIELDS = [
    # uncorrectable errors since the driver loaded: 1 fails
    ("h100x8", "sram_uncorrectable_parity", "1", "ecc", FAIL),
    ("h100x8", "sram_uncorrectable_secded", "1", "ecc", FAIL),
    ("h100x8", "dram_uncorrectable", "1", "ecc", FAIL),
    ("a100x8", "sram_uncorrectable", "1", "ecc", FAIL),
    ("h100x8", "dram_uncorrectable", "N/A", "ecc", OK),
    ("h100x8", "dram_uncorrectable", "ERR!", "ecc", UNKNOWN),
    ("h100x8", "sram_threshold_exceeded", "Yes", "ecc", FAIL),
    ("h100x8", "sram_threshold_exceeded", "No", "ecc", OK),
    ("h100x8", "sram_threshold_exceeded", "ERR!", "ecc", UNKNOWN),
    # modes
    ("h100x8", "current_ecc", "Disabled", "ecc", WARN),
    ("h100x8", "current_ecc", "ERR!", "ecc", UNKNOWN),
    ("h100x8", "current_mig", "Enabled", "mig", FAIL),
    ("h100x8", "current_mig", "ERR!", "mig", UNKNOWN),
    ("h100x8", "current_mig", "N/A", "mig", OK),
    ("h100x8", "reset_required", "Yes", "recovery", FAIL),
    ("h100x8", "drain_and_reset_recommended", "Yes", "recovery", FAIL),
    ("h200x8", "gpu_recovery_action", "Reboot", "recovery", FAIL),
    ("h200x8", "gpu_recovery_action", "Drain P2P", "recovery", FAIL),
    ("h200x8", "gpu_recovery_action", "None", "recovery", OK),
    # row remapping: 512 warns
    ("h100x8", "remapped_row_corr", "511", "row_remap", OK),
    ("h100x8", "remapped_row_corr", "512", "row_remap", WARN),
    ("h100x8", "remapped_row_unc", "512", "row_remap", WARN),
    ("h100x8", "remapped_row_pending", "Yes", "row_remap", FAIL),
    ("h100x8", "remapped_row_failure", "Yes", "row_remap", FAIL),
    ("h100x8", "remapped_row_failure", "Perhaps", "row_remap", UNKNOWN),
    # PCIe
    ("h100x8", "current_link_width", "15x", "pcie", FAIL),
    ("h100x8", "current_link_width", "16x", "pcie", OK),
    ("h100x8", "current_link_width", "ERR!", "pcie", UNKNOWN),
    ("h100x8", "current_link_gen", "4", "pcie", FAIL),
    ("h100x8", "max_link_gen", "6", "pcie", FAIL),
    ("h100x8", "performance_state", "ERR!", "pcie", UNKNOWN),
    # power and clocks
    ("h100x8", "current_power_limit", "699.99 W", "power_limit", WARN),
    ("h100x8", "current_power_limit", "700.00 W", "power_limit", OK),
    ("a100x8", "enforced_power_limit", "399.00 W", "power_limit", WARN),
    ("h100x8", "current_power_limit", "N/A", "power_limit", SKIP),
    # identity
    ("h100x8", "product_name", "NVIDIA H100 PCIe", "model", FAIL),
    ("h100x8", "product_name", "NVIDIA H100 80GB HBM3e", "model", FAIL),  # begins like the others
    *(("h100x8", "product_name", word, "model", UNKNOWN) for word in ("ERR!", "N/A")),
    ("h100x8", "attached_gpus", "9", "count", FAIL),
    ("h100x8", "attached_gpus", "ERR!", "count", UNKNOWN),
    # fabric
    ("h100x8", "state", "In Progress", "fabric", FAIL),
    ("h100x8", "state", "Not Started", "fabric", FAIL),
    ("h100x8", "status", "Failure", "fabric", FAIL),
    ("h100x8", "state", "ERR!", "fabric", UNKNOWN),
    ("h100x8", "aggregate>sram_uncorrectable_parity", "1", "ecc", OK),
    ("h100x8", "current_power_limit*", "699.99 W", "power_limit", WARN),
    ("h100x8", "fb_memory_usage>used", "15 MiB", "busy", OK),
    ("h100x8", "fb_memory_usage>used", "16 MiB", "busy", FAIL),
    *(("h100x8", "fb_memory_usage>used", word, "busy", UNKNOWN) for word in ("ERR!", "N/A")),
    ("h100x8", "applications_clocks>graphics_clock", "1979 MHz", "clocks", WARN),
    ("h100x8", "applications_clocks>graphics_clock", "N/A", "clocks", OK),  # newer drivers
    ("h100x8", "applications_clocks>graphics_clock", "ERR!", "clocks", UNKNOWN),
    ("h100x8", "max_clocks>sm_clock", "1965 MHz", "clocks", WARN),
    # reasons for slow clocks, under both names; others are settings and the power limit
    ("h100x8", "clocks_event_reason_sw_power_cap", "Active", "throttle", OK),
    ("h100x8", "clocks_event_reason_applications_clocks_setting", "Active", "throttle", OK),
    ("h100x8", "clocks_event_reason_sw_thermal_slowdown", "Active", "throttle", WARN),
    *(
        (profile, f"clocks_{word}_reason_hw_{reason}", "Active", "throttle", FAIL)
        for profile, word in (("h100x8", "event"), ("a100x8", "throttle"))
        for reason in ("slowdown", "thermal_slowdown", "power_brake_slowdown")
    ),
]


@pytest.mark.parametrize(("profile", "field", "value", "name", "expected"), FIELDS)
def test_one_field_decides_and_changes_no_other_check(
    profile: str, field: str, value: str, name: str, expected: Verdict
) -> None:
    findings = check(told(healthy(profile), field, value))
    devices = [None] if name in ("count", "model") or expected is OK else ALL_GPUS if field.endswith("*") else [GPU0]
    found = [one for one in findings if one.check == f"gpu.{name}"]
    assert [(one.device, one.severity) for one in found] == [(device, expected) for device in devices]
    assert expected not in (WARN, FAIL) or all(one.remedy for one in found)
    assert {one for one, _, _ in bad(findings)} <= {f"gpu.{name}", "gpu.nvidia_smi"}


def test_an_answer_without_the_mode_of_ecc_is_not_known_to_correct_errors() -> None:
    text = re.sub(r"<ecc_mode>.*?</ecc_mode>", "", healthy().section("gpu.smi").output, flags=re.DOTALL)
    assert ("gpu.ecc", GPU0, UNKNOWN) in bad(check(changed_section(healthy(), "gpu.smi", output=text)))


def test_a_lower_generation_counts_only_at_full_clocks() -> None:
    slow = told(healthy(), "current_link_gen", "1")
    assert verdict(slow, "gpu.pcie") is FAIL
    assert verdict(told(slow, "performance_state", "P8"), "gpu.pcie") is OK


@pytest.mark.parametrize(("kind", "expected"), [("C", FAIL), ("C+G", FAIL), ("M+C", FAIL), ("G", OK)])
def test_a_compute_process_makes_a_gpu_busy_however_little_it_holds(kind: str, expected: Verdict) -> None:
    info = f"<process_info><pid>7</pid><type>{kind}</type><process_name>x</process_name></process_info>"
    probe = with_text(healthy(), "gpu.smi", "</processes>", f"{info}</processes>")
    assert verdict(probe, "gpu.busy") is expected


def test_pages_to_retire_count_where_rows_are_not_remapped() -> None:
    """Before Ampere."""
    text = re.sub(r"<remapped_rows>.*?</remapped_rows>", "@", healthy().section("gpu.smi").output, flags=re.DOTALL)
    for answer, expected in (("No", OK), ("Yes", FAIL)):
        pages = f"<retired_pages><pending_retirement>{answer}</pending_retirement></retired_pages>"
        probe = changed_section(healthy(), "gpu.smi", output=text.replace("@", pages))
        assert {found.severity for found in check(probe) if found.check == "gpu.row_remap"} == {expected}


NVLINKS = healthy().section("gpu.nvlink").output
DEAD = "".join(f"\t Link {link}: <inactive>\n" for link in range(18))
DOWN = "NVML: Unable to retrieve NVLink information as all links are inActive\n"
TITLES = "\n".join(line for line in NVLINKS.splitlines() if line.startswith("GPU"))
UNREAD = "UNKNOWN gpu.nvlink: NVLinks cannot be read"


def first_link(text: str) -> str:
    return NVLINKS.replace("Link 3: 26.562 GB/s", text, 1)


def of_gpu_1(text: str) -> str:
    return re.sub(r"(GPU 1:[^\n]*\n).*?(?=GPU 2:)", rf"\1{text}", NVLINKS, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (first_link("Link 3: <inactive>"), ["FAIL gpu.nvlink (GPU 0): NVLink 3 inactive; expected: 18 links up"]),
        (
            first_link("Link 3: 25 GB/s"),
            ["FAIL gpu.nvlink (GPU 0): NVLink 3 at 25 GB/s; expected: 26.562 GB/s, as other links here"],
        ),
        (first_link("Link 3: a lot"), [UNREAD]),
        (
            NVLINKS.replace("\t Link 17: 26.562 GB/s\n", "", 1),
            ["FAIL gpu.nvlink (GPU 0): 17 NVLinks; expected: 18 links up"],
        ),
        *(
            (of_gpu_1(down), ["FAIL gpu.nvlink (GPU 1): no NVLink is up; expected: 18 links up"])
            for down in (DEAD, DOWN)
        ),
        (
            re.sub("GPU 7.*", "", NVLINKS, flags=re.DOTALL),
            ["UNKNOWN gpu.nvlink (GPU 7): not in the answer of `nvidia-smi nvlink --status`"],
        ),
        (TITLES, [f"FAIL gpu.nvlink ({device}): no NVLink is up; expected: all links up" for device in ALL_GPUS]),
        (
            "",
            [
                f"UNKNOWN gpu.nvlink ({device}): not in the answer of `nvidia-smi nvlink --status`"
                for device in ALL_GPUS
            ],
        ),
        ("Link 0: 25 GB/s", [UNREAD]),
    ],
)
def test_nvlinks(text: str, expected: list[str]) -> None:
    assert in_words(check(changed_section(healthy(), "gpu.nvlink", output=text))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["init", "nv-fabricmanage"]', []),
        ('["init"]', ["FAIL gpu.fabric: fabric manager does not run; expected: running"]),
        ("[]", ["UNKNOWN gpu.fabric: the fabric manager cannot be looked for: no process was seen"]),
    ],
)
def test_fabric_manager(text: str, expected: list[str]) -> None:
    assert in_words(check(changed_section(healthy(), "gpu.fabric_manager", output=text))) == expected


def without_switches(probe: NodeProbe) -> NodeProbe:
    told = json.loads(probe.section("gpu.lspci").output)
    told["devices"] = [row for row in told["devices"] if not row[1].startswith("0x0680")]
    return changed_section(probe, "gpu.lspci", output=json.dumps(told))


def test_a_virtual_machine_without_switches_of_its_own_trusts_the_fabric_state() -> None:
    probe = changed_section(without_switches(healthy()), "gpu.fabric_manager", exit_code=1)
    assert verdict(probe, "gpu.fabric") is OK


@pytest.mark.parametrize("text", ["", "GPU 0: NVIDIA H200 (UUID: GPU-1)\n" + DOWN])
def test_a_gpu_that_is_alone_has_nothing_to_be_linked_with(text: str) -> None:
    sections = {"gpu.smi": ended("gpu.smi", fixture_text("h200_570.xml")), "gpu.nvlink": ended("gpu.nvlink", text)}
    assert verdict(NodeProbe("n1", sections), "gpu.nvlink") is SKIP


def test_cards_without_nvlink_are_no_fault() -> None:
    probe = without_switches(told(healthy("a100x8"), "product_name*", "NVIDIA L40S"))
    findings = check(changed_section(probe, "gpu.nvlink", output=""))
    skipped = {found.check for found in findings if found.severity is SKIP}
    assert not bad(findings)
    assert skipped == {"gpu.nvlink", "gpu.fabric"}


def kernel(*lines: str, boot: bool = True) -> NodeProbe:
    told = {"reader": "dmesg", "total": 9, "boot": boot, "uptime": 9.0, "seen": [[2, line] for line in lines]}
    return changed_section(healthy(), "kernel.log", output=json.dumps(told))


XID = "NVRM: Xid (PCI:0000:52:00): {}, pid=9, name=python3, Ch 8"
SXID = "nvidia-nvswitch0: SXid (PCI:0000:f9:00.0): 20034, {}, Link 30 LTSSM Fault Up"
FOUND = "{} gpu.xid (GPU 2): Xid {} (2 times); expected: none since boot"
FALLEN = "FAIL gpu.xid (GPU {}): {}fallen off the bus; expected: none since boot"
SWITCH = "{} gpu.xid (0000:f9:00.0): SXid 20034 (2 times), {}; expected: none since boot"
GARBLED = "UNKNOWN gpu.xid: a line about an Xid that was not understood; expected: none since boot"
FORGOTTEN = "WARN gpu.xid: none in 9 lines of dmesg, but older ones are forgotten; expected: a log since boot"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        *(((XID.format(code),), [FOUND.format("WARN", code)]) for code in (13, 31, 94, 137, 999)),
        *(
            ((XID.format(code),), [FOUND.format("FAIL", code)])
            for code in (46, 48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 79, 151, 168)
        ),
        ((SXID.format("Non-fatal"),), [SWITCH.format("WARN", "non-fatal")]),
        ((SXID.format("Fatal"),), [SWITCH.format("FAIL", "fatal")]),
        ((SXID.format("Odd"),), [SWITCH.format("UNKNOWN", "of unknown gravity")]),
        (("nvidia-nvswitch0: SXid garbled", "NVRM: Xid garbled"), [GARBLED]),
        (
            (
                "NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                "NVRM: GPU 0000:61:00.0: GPU has fallen off the bus.",
                "NVRM: GPU 0000:9d:00.0: GPU has fallen off the bus.",
            ),
            [FALLEN.format(3, "Xid 79 (2 times), "), FALLEN.format(4, "")],
        ),
    ],
)
def test_lines_of_the_kernel_log(lines: tuple[str, ...], expected: list[str]) -> None:
    assert in_words(check(kernel(*lines))) == expected


def test_the_gravest_of_several_errors_says_what_to_do() -> None:
    found = only(check(kernel(XID.format(48), XID.format(79))), "gpu.xid")
    assert (found.observed, "reboot the node" in found.remedy) == ("Xid 48 (2 times), Xid 79 (2 times)", True)


def test_a_log_that_forgot_the_boot_is_not_fully_trusted() -> None:
    assert in_words(check(kernel(boot=False))) == [FORGOTTEN]


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", FAIL, "reset the GPU"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", FAIL, "drain and reboot"),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", FAIL, "reset the GPU"),
        ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", OK, ""),
        ("words that nobody knows", FAIL, "drain and reboot"),
    ],
)
def test_xid_154_means_what_its_text_says(text: str, expected: Verdict, words: str) -> None:
    found = only(check(kernel(f"NVRM: Xid (PCI:0000:52:00): 154, {text}")), "gpu.xid")
    assert found.severity is expected
    assert words in found.remedy


COUNTED = "FAIL gpu.count: 8 by nvidia-smi, 8 by driver, 8 by PCI; expected: {}"


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        ({"gpus": 8, "gpu_model": "h100"}, []),
        ({"gpus": 7}, [COUNTED.format("7 GPUs")]),
        ({"gpus": 0}, [COUNTED.format("at least one GPU")]),
        ({"gpu_model": "A100"}, ["FAIL gpu.model: 8 NVIDIA H100 80GB HBM3; expected: A100"]),
    ],
)
def test_expected_hardware(expected: dict[str, object], told: list[str]) -> None:
    assert in_words(check(healthy(), **expected)) == told


def test_traits_are_what_nodes_must_share_and_what_is_not_known_is_left_out() -> None:
    traits = GROUP.traits(healthy(), ClusterConfig())
    assert traits == {
        "gpu.clocks": "up to 1980 MHz",
        "gpu.count": "8",
        "gpu.driver": "550.127.05",
        "gpu.model": "NVIDIA H100 80GB HBM3",
        "gpu.nvlink": "18 x 26.562 GB/s",
        "gpu.power_limit": "700 W",
    }
    said = GROUP.traits(healthy(), ClusterConfig(expected=ExpectedHardware(gpus=8, gpu_model="H100")))
    assert said == {name: value for name, value in traits.items() if name not in ("gpu.count", "gpu.model")}
    mixed = GROUP.traits(told(healthy(), "product_name", "NVIDIA A100"), ClusterConfig())
    assert mixed["gpu.model"] == "NVIDIA A100, NVIDIA H100 80GB HBM3"
    unknown = GROUP.traits(told(healthy(), "product_name", "ERR!"), ClusterConfig())
    assert unknown == {name: value for name, value in traits.items() if name != "gpu.model"}


# Nodes without GPUs, and what other tools are known to let pass.


NO_DEVICES = '{"total": 30, "devices": []}'


def gpu_less(devices: str, said: str = "", code: int = 127, **more: Section) -> NodeProbe:
    sections = {"gpu.lspci": ended("gpu.lspci", devices), "gpu.smi": ended("gpu.smi", said, code)}
    return NodeProbe("node1", sections | {section.name: section for section in more.values()})


@pytest.mark.parametrize("expected", [None, 0])
def test_no_expected_gpus_and_no_sign_of_any_is_skipped(expected: int | None) -> None:
    probe = gpu_less(NO_DEVICES)
    assert {found.check: found.severity for found in check(probe, gpus=expected)} == dict.fromkeys(GROUP.checks, SKIP)
    assert GROUP.traits(probe, ClusterConfig()) == {"gpu.count": "0"}


@pytest.mark.parametrize(("attached", "severity"), [("0", SKIP), ("1", FAIL)])
def test_a_driver_without_gpus_is_skipped_unless_it_counts_some(attached: str, severity: Verdict) -> None:
    said = f"<?xml version='1.0'?><nvidia_smi_log><attached_gpus>{attached}</attached_gpus></nvidia_smi_log>"
    assert verdict(gpu_less(NO_DEVICES, said, 0), "gpu.count") is severity


@pytest.mark.parametrize(
    ("devices", "said", "code", "expected"),
    [
        (NO_DEVICES, "", 127, 8),  # GPUs are expected
        (NO_DEVICES[:-1], "", 127, None),  # the list of devices breaks off
        (NO_DEVICES.replace("30", "0"), "No devices were found", 6, None),  # no PCI bus to look at, but a driver's tool
        (NO_DEVICES, "No devices were found", 6, None),  # a driver that has lost its devices
        (NO_DEVICES, "Failed to initialize NVML: Unknown Error", 255, None),
    ],
)
def test_a_node_that_may_have_gpus_is_not_skipped(devices: str, said: str, code: int, expected: int | None) -> None:
    findings = check(gpu_less(devices, said, code), gpus=expected)
    assert ("gpu.nvidia_smi", None, FAIL) in bad(findings)
    assert not [found for found in findings if found.severity is OK]


def test_a_field_that_never_exists_is_not_no_throttling() -> None:
    """The mask was renamed at driver 535: who asks for the old name only sees nothing, and that is not health."""
    text = healthy().section("gpu.smi").output
    probe = changed_section(healthy(), "gpu.smi", output=text.replace("clocks_event_reason", "clocks_new_name"))
    assert in_words(check(probe)) == [
        f"UNKNOWN gpu.throttle ({device}): not in the answer; expected: full clocks" for device in ALL_GPUS
    ]
