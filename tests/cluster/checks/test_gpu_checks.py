"""Every rule of the group gpu, just below, at and above its limit, on an otherwise healthy node."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rehearsal import GPU as GROUP
from rehearsal import check, fixture_text, healthy, with_text
from testkit.check_fakes import bad, changed_section, ended, only
from testkit.check_fakes import told as in_words

from cluster.checks.finding import Verdict
from cluster.checks.groups.gpu_use import SMOKE_SECTION, cuda_smoke_question
from cluster.survey.section import NodeProbe, Section, SectionState
from engine.config.cluster import ClusterConfig, ContainerConfig, ExpectedHardware
from engine.config.errors import ConfigError

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
    ("h100x8", "current_ecc", "Disabled", "ecc_mode", WARN),
    ("h100x8", "pending_ecc", "Disabled", "ecc_mode", WARN),
    ("h100x8", "pending_ecc", "ERR!", "ecc_mode", UNKNOWN),
    ("h100x8", "current_mig", "Enabled", "mig", FAIL),
    ("h100x8", "pending_mig", "Enabled", "mig", WARN),
    ("h100x8", "pending_mig", "ERR!", "mig", UNKNOWN),
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
    ("h100x8", "product_name", "ERR!", "model", UNKNOWN),
    ("h100x8", "product_name", "N/A", "model", UNKNOWN),
    ("h100x8", "attached_gpus", "9", "count", FAIL),
    ("h100x8", "attached_gpus", "ERR!", "count", UNKNOWN),
    # fabric
    ("h100x8", "state", "In Progress", "fabric_manager", FAIL),
    ("h100x8", "state", "Not Started", "fabric_manager", FAIL),
    ("h100x8", "status", "Failure", "fabric_manager", FAIL),
    ("h100x8", "state", "ERR!", "fabric_manager", UNKNOWN),
    ("h100x8", "aggregate>sram_uncorrectable_parity", "1", "ecc", OK),
    ("h100x8", "current_mig*", "Enabled", "mig", WARN),
    ("h100x8", "current_power_limit*", "699.99 W", "power_limit", WARN),
    ("h100x8", "applications_clocks>graphics_clock", "1979 MHz", "clocks", WARN),
    ("h100x8", "max_clocks>sm_clock", "1965 MHz", "clocks", WARN),
    ("h100x8", "used", "70000 MiB", "busy", OK),  # at the first look only
    ("h100x8", "gpu.again:used", "15 MiB", "busy", OK),
    ("h100x8", "gpu.again:used", "16 MiB", "busy", FAIL),
    ("h100x8", "gpu.again:used", "ERR!", "busy", UNKNOWN),
    # every throttle reason, under both names; NVML has bits for more, which are settings and the power limit
    *(
        (profile, f"clocks_{word}_reason_{reason}", "Active", "throttle", severity)
        for profile, word in (("h100x8", "event"), ("a100x8", "throttle"))
        for reason, severity in {
            "gpu_idle": OK,
            "applications_clocks_setting": OK,
            "sw_power_cap": OK,
            "hw_slowdown": FAIL,
            "sync_boost": OK,
            "sw_thermal_slowdown": WARN,
            "hw_thermal_slowdown": FAIL,
            "hw_power_brake_slowdown": FAIL,
            "display_clocks_setting": OK,
        }.items()
    ),
]


@pytest.mark.parametrize(("profile", "field", "value", "name", "expected"), FIELDS)
def test_one_field_decides_and_changes_no_other_check(
    profile: str, field: str, value: str, name: str, expected: Verdict
) -> None:
    findings = check(told(healthy(profile), field, value))
    devices = [None] if name == "count" or expected is OK else ALL_GPUS if field.endswith("*") else [GPU0]
    found = [one for one in findings if one.check == f"gpu.{name}"]
    assert [(one.device, one.severity) for one in found] == [(device, expected) for device in devices]
    assert expected not in (WARN, FAIL) or all(one.remedy for one in found)
    assert {one for one, _, _ in bad(findings)} <= {f"gpu.{name}", "gpu.lost"}


def test_a_lower_generation_counts_only_at_full_clocks() -> None:
    slow = told(healthy(), "current_link_gen", "1")
    assert verdict(slow, "gpu.pcie") is FAIL
    assert verdict(told(slow, "performance_state", "P8"), "gpu.pcie") is OK


@pytest.mark.parametrize(("kind", "expected"), [("C", FAIL), ("C+G", FAIL), ("M+C", FAIL), ("G", OK)])
def test_a_compute_process_makes_a_gpu_busy_however_little_it_holds(kind: str, expected: Verdict) -> None:
    info = f"<process_info><pid>7</pid><type>{kind}</type><process_name>x</process_name></process_info>"
    probe = with_text(healthy(), "gpu.again", "</processes>", f"{info}</processes>")
    assert verdict(probe, "gpu.busy") is expected


def test_a_gpu_that_the_second_look_does_not_show_is_not_known_to_be_free() -> None:
    assert verdict(with_text(healthy(), "gpu.again", "00000000:1B:00.0", "00000000:1C:00.0"), "gpu.busy") is UNKNOWN


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
        (TITLES, [f"FAIL gpu.nvlink ({device}): no NVLink is up; expected: 18 links up" for device in ALL_GPUS]),
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
    ("models", "links"),
    [
        (("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20", "NVIDIA B200"), 18),
        (("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 12),
        (("NVIDIA A800-SXM4-80GB", "NVIDIA H800"), 8),
    ],
)
def test_a_model_has_so_many_nvlinks_even_where_all_gpus_lack_one(models: tuple[str, ...], links: int) -> None:
    lack = [f"FAIL gpu.nvlink ({device}): {links - 1} NVLinks; expected: {links} links up" for device in ALL_GPUS]
    for model in models:
        for there, expected in ((links, []), (links - 1, lack)):
            text = re.sub(rf"\t Link (?:{'|'.join(map(str, range(there, 18)))}): .*\n?", "", NVLINKS)
            probe = changed_section(told(healthy(), "product_name*", model), "gpu.nvlink", output=text)
            assert in_words(check(probe)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["init", "nv-fabricmanage"]', []),
        ('["init"]', ["FAIL gpu.fabric_manager: fabric manager does not run; expected: running, for 4 NVSwitches"]),
        ("[]", ["UNKNOWN gpu.fabric_manager: the fabric manager cannot be looked for: no process was seen"]),
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
    assert verdict(probe, "gpu.fabric_manager") is OK


def test_cards_without_nvlink_are_no_fault() -> None:
    probe = without_switches(told(healthy("a100x8"), "product_name*", "NVIDIA L40S"))
    findings = check(changed_section(probe, "gpu.nvlink", output=""))
    skipped = {found.check for found in findings if found.severity is SKIP}
    assert not bad(findings)
    assert skipped == {"gpu.nvlink", "gpu.fabric_manager", "gpu.cuda_smoke"}


def test_a_gpu_that_is_alone_has_nothing_to_be_linked_with() -> None:
    """Nvidia-smi may list it, with links that are down, or leave it out."""
    for text in ("", "GPU 0: NVIDIA H200 (UUID: GPU-1)\n" + DOWN):
        sections = {"gpu.smi": ended("gpu.smi", fixture_text("h200_570.xml")), "gpu.nvlink": ended("gpu.nvlink", text)}
        found = only(check(replace(healthy("h200x8"), sections=sections)), "gpu.nvlink")
        assert (found.severity, found.observed) == (SKIP, "one GPU: there is no other to link it with")


def kernel(*lines: str, reach: str = "since boot") -> NodeProbe:
    seen = "".join(f"seen\t2\t{line}\n" for line in lines)
    return changed_section(healthy(), "kernel.log", output=f"{seen}log\tdmesg\t9\t{reach}")


XID = "NVRM: Xid (PCI:0000:52:00): {}, pid=9, name=python3, Ch 8"
SXID = "nvidia-nvswitch0: SXid (PCI:0000:f9:00.0): 20034, {}, Link 30 LTSSM Fault Up"
FOUND = "{} gpu.xid (GPU 2): Xid {} (2 times){} (last of python3, pid 9); expected: no Xid since boot"
FALLEN = "FAIL gpu.xid (GPU {}): Xid 79 (2 times): fallen off the bus; expected: no Xid since boot"
FORGOTTEN = "WARN gpu.{}: no {} in 9 lines of dmesg, but older ones are forgotten; expected: a log since boot"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        *(
            ((XID.format(code),), [FOUND.format("WARN", code, "")])
            for code in (13, 31, 32, 43, 45, 63, 92, 94, 121, 137, 999)
        ),
        *(
            ((XID.format(code),), [FOUND.format("FAIL", code, ": fallen off the bus" if code == 79 else "")])
            for code in (46, 48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 79, 151, 168)
        ),
        (
            (SXID.format("Non-fatal"),),
            ["WARN gpu.sxid (0000:f9:00.0): SXid 20034 (2 times), non-fatal; expected: none"],
        ),
        ((SXID.format("Fatal"),), ["FAIL gpu.sxid (0000:f9:00.0): SXid 20034 (2 times), fatal; expected: none"]),
        (
            (SXID.format("Odd"),),
            ["UNKNOWN gpu.sxid (0000:f9:00.0): SXid 20034 (2 times), of unknown gravity; expected: none"],
        ),
        (("nvidia-nvswitch0: SXid garbled",), ["UNKNOWN gpu.sxid: a line about an SXid that was not understood"]),
        (("NVRM: Xid garbled",), ["UNKNOWN gpu.xid: a line about an Xid that was not understood"]),
        (  # forges no end
            ("NVRM: Xid (PCI:0000:1b:00): 31, name=a\tlog\tdmesg",),
            ["WARN gpu.xid (GPU 0): Xid 31 (2 times) (last of a log dmesg); expected: no Xid since boot"],
        ),
        (  # told once
            (
                "NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                "NVRM: GPU 0000:61:00.0: GPU has fallen off the bus.",
                "NVRM: GPU 0000:9d:00.0: GPU has fallen off the bus.",
            ),
            [FALLEN.format(3), FALLEN.format(4)],
        ),
    ],
)
def test_lines_of_the_kernel_log(lines: tuple[str, ...], expected: list[str]) -> None:
    assert in_words(check(kernel(*lines))) == expected


def test_a_log_that_forgot_the_boot_is_not_fully_trusted() -> None:
    assert in_words(check(kernel(reach="cut"))) == [FORGOTTEN.format("xid", "Xid"), FORGOTTEN.format("sxid", "SXid")]


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", FAIL, "has to be reset"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", FAIL, "rebooted"),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", FAIL, "has to be reset"),
        ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", OK, ""),
        ("words that nobody knows", FAIL, "rebooted"),
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
        (
            {"gpu_model": "A100"},
            [f"FAIL gpu.model ({device}): model NVIDIA H100 80GB HBM3; expected: model A100" for device in ALL_GPUS],
        ),
    ],
)
def test_expected_hardware(expected: dict[str, object], told: list[str]) -> None:
    assert in_words(check(healthy(), **expected)) == told


def test_what_the_configuration_says_is_not_compared_between_nodes() -> None:
    config = ClusterConfig(expected=ExpectedHardware(gpus=8, gpu_model="H100"))
    assert not {"gpu.count", "gpu.model"} & set(GROUP.traits(healthy(), config))
    assert GROUP.traits(gpu_less(NO_DEVICES), config) == {}


def test_traits_are_what_nodes_must_share_and_what_is_not_known_is_left_out() -> None:
    traits = GROUP.traits(healthy(), ClusterConfig())
    assert traits == {
        "gpu.clocks": "1980/2619 MHz",
        "gpu.count": "8",
        "gpu.driver": "550.127.05",
        "gpu.ecc_mode": "Enabled",
        "gpu.mig": "Disabled",
        "gpu.model": "NVIDIA H100 80GB HBM3",
        "gpu.nvlink": "18 x 26.562 GB/s",
        "gpu.power_limit": "700 W",
    }
    mixed = GROUP.traits(told(healthy(), "product_name", "NVIDIA A100"), ClusterConfig())
    assert mixed["gpu.model"] == "NVIDIA A100, NVIDIA H100 80GB HBM3"
    unknown = GROUP.traits(told(healthy(), "product_name", "ERR!"), ClusterConfig())
    assert unknown == {name: value for name, value in traits.items() if name != "gpu.model"}


@pytest.mark.parametrize(
    ("section", "severity", "observed"),
    [
        (ended(SMOKE_SECTION, "a warning\ncuda works on 8"), OK, "cuda works on 8"),
        (ended(SMOKE_SECTION, "cuda works on 7"), FAIL, "7 GPUs in the image"),
        (ended(SMOKE_SECTION, "no CUDA", 1), FAIL, "CUDA fails in the image: gpu.smoke: exit code 1"),
        (ended(SMOKE_SECTION, "no CUDA"), FAIL, "CUDA fails in the image: "),
        (Section(SMOKE_SECTION, "cuda works on 8", None, SectionState.TIMED_OUT), UNKNOWN, "gpu.smoke: timed out"),
    ],
)
def test_cuda_in_the_image_works_on_all_gpus_or_fails(section: Section, severity: Verdict, observed: str) -> None:
    found = only(check(replace(healthy(), sections={**healthy().sections, SMOKE_SECTION: section})), "gpu.cuda_smoke")
    assert (found.severity, found.observed) == (severity, observed)


def test_the_smoke_test_needs_an_image() -> None:
    question = cuda_smoke_question(ContainerConfig("docker", "a;b:c", "sudo docker"))
    command = (
        "sudo docker run --rm --gpus all --network none --pull never --entrypoint python 'a;b:c' -c 'import torch;"
    )
    assert question.script.startswith(command)
    for container in (ContainerConfig("bare", "burst:latest"), ContainerConfig("docker", None)):
        with pytest.raises(ConfigError, match="inside an image"):
            cuda_smoke_question(container)


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


def test_gpus_that_fell_off_the_bus_are_remembered_by_the_kernel() -> None:
    """The PCI bus lists none any more, and no tool is there to ask."""
    line = "[9.0] NVRM: Xid (PCI:0000:52:00): 79, pid=9, name=python3, GPU has fallen off the bus."
    log = ended("kernel.log", f"seen\t1\t{line}\nlog\tdmesg\t9\tsince boot")
    assert bad(check(gpu_less(NO_DEVICES, log=log))) == [("gpu.xid", "0000:52:00.0", FAIL)]


def test_a_field_that_never_exists_is_not_no_throttling() -> None:
    """The mask was renamed at driver 535: who asks for the old name only sees nothing, and that is not health."""
    text = healthy().section("gpu.smi").output
    probe = changed_section(healthy(), "gpu.smi", output=text.replace("clocks_event_reason", "clocks_new_name"))
    assert in_words(check(probe)) == [
        f"UNKNOWN gpu.throttle ({device}): not in the answer; expected: full clocks" for device in ALL_GPUS
    ]
