"""Every threshold of the group gpu, just below, at and above it, on an otherwise healthy node."""

from __future__ import annotations

import re

import pytest
from gpu_rehearsal import bad, check, ended, fixture_text, healthy, only, with_section, with_text

from cluster.checks.finding import Finding, Verdict
from cluster.checks.gpu import GROUP
from cluster.checks.gpu_smoke import SMOKE_SECTION, cuda_smoke_section
from cluster.probe.section import NodeProbe, Section, SectionState
from engine.config_cluster import ClusterConfig, ContainerConfig

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN
GPU0 = "GPU 0"


def first_gpu(probe: NodeProbe, tag: str, value: str, section: str = "gpu.smi") -> NodeProbe:
    """`probe` where the first element `tag` of the XML says `value`."""
    text = probe.section(section).output
    changed, count = re.subn(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>{value}</{tag}>", text, count=1)
    assert count == 1, tag
    return with_section(probe, section, output=changed)


def all_gpus(probe: NodeProbe, tag: str, value: str, section: str = "gpu.smi") -> NodeProbe:
    """`probe` where every element `tag` of the XML says `value`."""
    text = re.sub(rf"<{tag}>[^<]*</{tag}>", f"<{tag}>{value}</{tag}>", probe.section(section).output)
    return with_section(probe, section, output=text)


def verdict(probe: NodeProbe, name: str) -> Verdict:
    return only(check(probe), name).severity


@pytest.mark.parametrize(
    ("profile", "tag", "value", "name", "expected"),
    [
        # uncorrectable errors since the driver loaded: 1 fails
        ("h100x8", "sram_uncorrectable_parity", "1", "gpu.ecc", FAIL),
        ("h100x8", "sram_uncorrectable_secded", "1", "gpu.ecc", FAIL),
        ("h100x8", "dram_uncorrectable", "1", "gpu.ecc", FAIL),
        ("a100x8", "sram_uncorrectable", "1", "gpu.ecc", FAIL),
        ("h100x8", "dram_uncorrectable", "N/A", "gpu.ecc", OK),
        ("h100x8", "dram_uncorrectable", "ERR!", "gpu.ecc", UNKNOWN),
        ("h100x8", "sram_threshold_exceeded", "Yes", "gpu.sram", FAIL),
        ("h100x8", "sram_threshold_exceeded", "No", "gpu.sram", OK),
        # modes
        ("h100x8", "current_ecc", "Disabled", "gpu.ecc_mode", WARN),
        ("h100x8", "pending_ecc", "Disabled", "gpu.ecc_mode", WARN),
        ("h100x8", "current_mig", "Enabled", "gpu.mig", FAIL),
        ("h100x8", "pending_mig", "Enabled", "gpu.mig", WARN),
        ("h100x8", "current_mig", "N/A", "gpu.mig", OK),
        ("h100x8", "reset_required", "Yes", "gpu.recovery", FAIL),
        ("h100x8", "drain_and_reset_recommended", "Yes", "gpu.recovery", FAIL),
        ("h200x8", "gpu_recovery_action", "Reboot", "gpu.recovery", FAIL),
        ("h200x8", "gpu_recovery_action", "Drain P2P", "gpu.recovery", FAIL),
        ("h200x8", "gpu_recovery_action", "None", "gpu.recovery", OK),
        # row remapping: 512 warns
        ("h100x8", "remapped_row_corr", "511", "gpu.row_remap", OK),
        ("h100x8", "remapped_row_corr", "512", "gpu.row_remap", WARN),
        ("h100x8", "remapped_row_unc", "512", "gpu.row_remap", WARN),
        ("h100x8", "remapped_row_pending", "Yes", "gpu.row_remap", FAIL),
        ("h100x8", "remapped_row_failure", "Yes", "gpu.row_remap", FAIL),
        ("h100x8", "remapped_row_failure", "Perhaps", "gpu.row_remap", UNKNOWN),
        # PCIe
        ("h100x8", "current_link_width", "15x", "gpu.pcie", FAIL),
        ("h100x8", "current_link_width", "16x", "gpu.pcie", OK),
        ("h100x8", "current_link_width", "ERR!", "gpu.pcie", UNKNOWN),
        ("h100x8", "current_link_gen", "4", "gpu.pcie", FAIL),
        ("h100x8", "max_link_gen", "6", "gpu.pcie", FAIL),
        # power and clocks
        ("h100x8", "current_power_limit", "699.99 W", "gpu.power_limit", WARN),
        ("h100x8", "current_power_limit", "700.00 W", "gpu.power_limit", OK),
        ("a100x8", "enforced_power_limit", "399.00 W", "gpu.power_limit", WARN),
        ("h100x8", "current_power_limit", "N/A", "gpu.power_limit", SKIP),
        # identity
        ("h100x8", "product_name", "NVIDIA H100 PCIe", "gpu.model", FAIL),
        ("h100x8", "product_name", "ERR!", "gpu.model", UNKNOWN),
        ("h100x8", "attached_gpus", "9", "gpu.count", FAIL),
        ("h100x8", "attached_gpus", "ERR!", "gpu.count", UNKNOWN),
        # fabric
        ("h100x8", "state", "In Progress", "gpu.fabric_manager", FAIL),
        ("h100x8", "state", "Not Started", "gpu.fabric_manager", FAIL),
        ("h100x8", "status", "Failure", "gpu.fabric_manager", FAIL),
        ("h100x8", "state", "ERR!", "gpu.fabric_manager", UNKNOWN),
    ],
)
def test_one_field_of_one_gpu_decides(profile: str, tag: str, value: str, name: str, expected: Verdict) -> None:
    probe = first_gpu(healthy(profile), tag, value)
    found = only(check(probe), name)
    assert found.severity is expected
    whole_node = name in ("gpu.count",) or expected is OK
    assert found.device == (None if whole_node else GPU0)
    assert expected not in (WARN, FAIL) or found.remedy


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("gpu_idle", OK),
        ("applications_clocks_setting", OK),
        ("sw_power_cap", OK),
        ("hw_slowdown", FAIL),
        ("sync_boost", WARN),
        ("sw_thermal_slowdown", WARN),
        ("hw_thermal_slowdown", FAIL),
        ("hw_power_brake_slowdown", FAIL),
        ("display_clocks_setting", WARN),
    ],
)
@pytest.mark.parametrize(("profile", "word"), [("h100x8", "event"), ("a100x8", "throttle")])
def test_each_throttle_reason_under_both_names(profile: str, word: str, reason: str, expected: Verdict) -> None:
    probe = first_gpu(healthy(profile), f"clocks_{word}_reason_{reason}", "Active")
    assert verdict(probe, "gpu.throttle") is expected


def test_a_lower_generation_counts_only_at_full_clocks() -> None:
    slow = first_gpu(healthy(), "current_link_gen", "1")
    assert verdict(slow, "gpu.pcie") is FAIL
    assert verdict(first_gpu(slow, "performance_state", "P8"), "gpu.pcie") is OK
    assert verdict(first_gpu(slow, "performance_state", "ERR!"), "gpu.pcie") is UNKNOWN


@pytest.mark.parametrize(("used", "expected"), [("15 MiB", OK), ("16 MiB", FAIL), ("ERR!", UNKNOWN)])
def test_memory_in_use_without_a_process(used: str, expected: Verdict) -> None:
    probe = first_gpu(healthy(), "used", used, "gpu.again")
    assert verdict(probe, "gpu.busy") is expected


def test_what_was_in_use_at_the_first_look_only_is_free() -> None:
    assert verdict(first_gpu(healthy(), "used", "70000 MiB"), "gpu.busy") is OK


@pytest.mark.parametrize(("kind", "expected"), [("C", FAIL), ("C+G", FAIL), ("M+C", FAIL), ("G", OK)])
def test_a_compute_process_makes_a_gpu_busy_however_little_it_holds(kind: str, expected: Verdict) -> None:
    info = f"<process_info><pid>7</pid><type>{kind}</type><process_name>x</process_name></process_info>"
    probe = with_text(healthy(), "gpu.again", "</processes>", f"{info}</processes>")
    assert verdict(probe, "gpu.busy") is expected


def test_errors_of_sram_in_the_life_of_the_board_warn() -> None:
    text = healthy().section("gpu.smi").output
    start = text.index("<aggregate>")
    tail = text[start:].replace("<sram_uncorrectable_parity>0<", "<sram_uncorrectable_parity>1<", 1)
    findings = check(with_section(healthy(), "gpu.smi", output=text[:start] + tail))
    assert bad(findings) == {("gpu.sram", GPU0, WARN)}


def test_a_board_with_mig_everywhere_warns_on_every_gpu() -> None:
    findings = check(all_gpus(healthy(), "current_mig", "Enabled"))
    assert bad(findings) == {("gpu.mig", f"GPU {index}", WARN) for index in range(8)}


def test_pages_to_retire_count_where_rows_are_not_remapped() -> None:
    """Before Ampere."""
    text = re.sub(r"<remapped_rows>.*?</remapped_rows>", "@", healthy().section("gpu.smi").output, flags=re.DOTALL)
    for answer, expected in (("No", OK), ("Yes", FAIL)):
        pages = f"<retired_pages><pending_retirement>{answer}</pending_retirement></retired_pages>"
        probe = with_section(healthy(), "gpu.smi", output=text.replace("@", pages))
        assert {found.severity for found in check(probe) if found.check == "gpu.row_remap"} == {expected}


def test_a_limit_lowered_on_all_gpus_warns_on_all() -> None:
    probe = all_gpus(healthy(), "current_power_limit", "699.99 W")
    assert bad(check(probe)) == {("gpu.power_limit", f"GPU {index}", WARN) for index in range(8)}


def test_lowered_application_clocks_warn() -> None:
    text = healthy().section("gpu.smi").output
    start = text.index("<applications_clocks>")
    tail = text[start:].replace("1980 MHz", "1979 MHz", 1)
    assert bad(check(with_section(healthy(), "gpu.smi", output=text[:start] + tail))) == {("gpu.clocks", GPU0, WARN)}


def test_a_gpu_whose_highest_clock_is_lower_warns() -> None:
    text = healthy().section("gpu.smi").output
    start = text.index("<max_clocks>")
    tail = text[start:].replace("<sm_clock>1980", "<sm_clock>1965", 1)
    assert bad(check(with_section(healthy(), "gpu.smi", output=text[:start] + tail))) == {("gpu.clocks", GPU0, WARN)}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("Link 3: 26.562 GB/s", "Link 3: <inactive>", FAIL),
        ("Link 3: 26.562 GB/s", "Link 3: 25 GB/s", FAIL),
        ("\t Link 17: 26.562 GB/s\n", "", FAIL),
        ("Link 3: 26.562 GB/s", "Link 3: a lot", UNKNOWN),
    ],
)
def test_one_nvlink_decides(old: str, new: str, expected: Verdict) -> None:
    assert verdict(with_text(healthy(), "gpu.nvlink", old, new), "gpu.nvlink") is expected


def test_nvlinks_are_counted_against_the_model_when_all_gpus_lack_one() -> None:
    text = re.sub(r"\t Link 17: .*\n?", "", healthy().section("gpu.nvlink").output)
    findings = check(with_section(healthy(), "gpu.nvlink", output=text))
    assert {found.severity for found in findings if found.check == "gpu.nvlink"} == {FAIL}


def test_a_pair_without_peer_access_fails() -> None:
    found = only(check(with_text(healthy(), "gpu.p2p", "OK", "CNS")), "gpu.p2p")
    assert (found.severity, found.evidence) == (FAIL, "GPU 0 to 1: CNS")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unit\tactive\nprocess\t1\nscanned\t9\tend", OK),
        ("unit\tfailed\nprocess\t1\nscanned\t9\tend", FAIL),
        ("unit\tactive\nscanned\t9\tend", FAIL),
        ("process\t1\nversion\tFabric Manager version is : 550.127.05\nscanned\t9\tend", OK),
        ("process\t1\nversion\tFabric Manager version is : 550.90.07\nscanned\t9\tend", FAIL),
        ("process\t1\nscanned\t0\tend", UNKNOWN),
    ],
)
def test_fabric_manager(text: str, expected: Verdict) -> None:
    assert verdict(with_section(healthy(), "gpu.fabric_manager", output=text), "gpu.fabric_manager") is expected


def test_a_virtual_machine_without_switches_of_its_own_trusts_the_fabric_state() -> None:
    text = healthy().section("gpu.lspci").output
    lines = [line for line in text.splitlines() if "class=0x0680" not in line]
    probe = with_section(healthy(), "gpu.lspci", output="\n".join(lines))
    assert verdict(with_section(probe, "gpu.fabric_manager", exit_code=1), "gpu.fabric_manager") is OK


def pcie_only(section: str = "gpu.nvlink", text: str = "") -> NodeProbe:
    """A node of PCIe cards: another model, no switches, no fabric, no links."""
    probe = all_gpus(healthy("a100x8"), "product_name", "NVIDIA L40S")
    lines = [line for line in probe.section("gpu.lspci").output.splitlines() if "class=0x0680" not in line]
    probe = with_section(probe, "gpu.lspci", output="\n".join(lines))
    probe = with_section(probe, "gpu.p2p", output=probe.section("gpu.p2p").output.replace("OK", "NS"))
    return with_section(probe, section, output=text)


def test_cards_without_nvlink_are_no_fault() -> None:
    findings = check(pcie_only())
    skipped = {found.check for found in findings if found.severity is SKIP}
    assert bad(findings) == set()
    assert skipped == {"gpu.nvlink", "gpu.p2p", "gpu.fabric_manager", "gpu.cuda_smoke"}


def test_boards_that_come_with_nvlink_and_show_none_fail() -> None:
    probe = with_section(healthy(), "gpu.nvlink", output="")
    titles = "\n".join(line for line in healthy().section("gpu.nvlink").output.splitlines() if line.startswith("GPU"))
    assert UNKNOWN in {found.severity for found in check(probe) if found.check == "gpu.nvlink"}
    dead = with_section(healthy(), "gpu.nvlink", output=titles)
    assert {found.severity for found in check(dead) if found.check == "gpu.nvlink"} == {FAIL}


@pytest.mark.parametrize(
    ("code", "expected"),
    [*((code, WARN) for code in (13, 63, 94, 137, 999)), *((code, FAIL) for code in (48, 64, 74, 79, 143, 151, 168))],
)
def test_an_xid_by_its_class(code: int, expected: Verdict) -> None:
    line = f"seen\t2\t[9.0] NVRM: Xid (PCI:0000:52:00): {code}, pid=9, name=python3, Ch 8\n"
    probe = with_section(healthy(), "gpu.kernel", output=f"{line}log\tdmesg\t9\tsince boot")
    found = only(check(probe), "gpu.xid")
    assert (found.severity, found.device) == (expected, "GPU 2")
    assert f"Xid {code} (2 times)" in found.observed


def kernel(*lines: str, reach: str = "since boot") -> NodeProbe:
    seen = "".join(f"seen\t1\t{line}\n" for line in lines)
    return with_section(healthy(), "gpu.kernel", output=f"{seen}log\tdmesg\t9\t{reach}")


def test_xid_154_by_its_text() -> None:
    head = "NVRM: Xid (PCI:0000:52:00): 154, GPU recovery action changed from"
    assert verdict(kernel(f"{head} 0x0 (None) to 0x2 (Node Reboot Required)"), "gpu.xid") is FAIL
    assert verdict(kernel(f"{head} 0x1 (GPU Reset Required) to 0x0 (None)"), "gpu.xid") is OK


def test_a_log_that_forgot_the_boot_is_not_fully_trusted() -> None:
    probe = kernel(reach="cut")
    assert (verdict(probe, "gpu.xid"), verdict(probe, "gpu.sxid")) == (WARN, WARN)


def test_switch_errors_by_their_own_word() -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:f9:00.0): 20034, {}, Link 30 LTSSM Fault Up"
    assert verdict(kernel(line.format("Non-fatal")), "gpu.sxid") is WARN
    assert verdict(kernel(line.format("Fatal")), "gpu.sxid") is FAIL
    assert verdict(kernel(line.format("Odd")), "gpu.sxid") is UNKNOWN
    assert verdict(kernel("nvidia-nvswitch0: SXid garbled"), "gpu.sxid") is UNKNOWN
    assert verdict(kernel("NVRM: Xid garbled"), "gpu.xid") is UNKNOWN


@pytest.mark.parametrize(
    ("expected", "name", "severity"),
    [
        ({"gpus": 8}, "gpu.count", OK),
        ({"gpus": 7}, "gpu.count", FAIL),
        ({"gpus": 9}, "gpu.count", FAIL),
        ({"gpus": 0}, "gpu.count", FAIL),
        ({"gpu_model": "H100"}, "gpu.model", OK),
        ({"driver": "550"}, "gpu.driver", OK),
        ({"driver": "550.127"}, "gpu.driver", OK),
        ({"driver": "550.127.05"}, "gpu.driver", OK),
        ({"driver": "55"}, "gpu.driver", FAIL),
        ({"driver": "550.12"}, "gpu.driver", FAIL),
        ({"driver": "535"}, "gpu.driver", FAIL),
    ],
)
def test_expected_hardware(expected: dict[str, object], name: str, severity: Verdict) -> None:
    assert only(check(healthy(), **expected), name).severity is severity


def test_another_model_than_expected_names_every_gpu() -> None:
    assert len(bad(check(healthy(), gpu_model="A100"), FAIL)) == 8


def test_the_fixture_of_a_gpu_in_trouble_names_all_of_it() -> None:
    """Two H100: the second one has nearly every fault."""
    probe = NodeProbe("node1", {"gpu.smi": ended(fixture_text("h100_550.xml"))})
    failed = {found.check for found in check(probe) if found.device == "GPU 1" and found.severity is FAIL}
    assert failed == {
        "gpu.recovery",
        "gpu.ecc",
        "gpu.sram",
        "gpu.row_remap",
        "gpu.pcie",
        "gpu.throttle",
        "gpu.fabric_manager",
    }
    warned = {found.check for found in check(probe) if found.device == "GPU 1" and found.severity is WARN}
    assert warned == {"gpu.power_limit", "gpu.clocks"}


def test_a_repair_that_waits_is_named() -> None:
    probe = NodeProbe("node1", {"gpu.smi": ended(fixture_text("h200_570.xml"))})
    assert only(check(probe), "gpu.row_remap").observed == "tpc repair pending: Yes"


def test_traits_are_what_nodes_must_share() -> None:
    traits = GROUP.traits(healthy(), ClusterConfig())
    assert traits["gpu.driver"] == "550.127.05"
    assert traits["gpu.nvlink"] == "18 x 26.562 GB/s"
    assert traits["gpu.power_limit"] == "700 W"
    assert (traits["gpu.count"], traits["gpu.model"]) == ("8", "NVIDIA H100 80GB HBM3")


def test_a_trait_that_is_not_known_is_left_out() -> None:
    assert "gpu.model" not in GROUP.traits(first_gpu(healthy(), "product_name", "ERR!"), ClusterConfig())
    assert GROUP.traits(with_section(healthy(), "gpu.smi", exit_code=1), ClusterConfig()) == {}


def test_every_check_gives_a_finding_with_its_own_name() -> None:
    names = [found.check for found in check(healthy())]
    assert len(names) == len(set(names)) == len(GROUP.checks)
    assert all(name.startswith("gpu.") for name in names)


def smoke(text: str, **changes: object) -> Finding:
    section = Section(SMOKE_SECTION, text, 0, SectionState.ENDED)
    probe = NodeProbe("node1", {**healthy().sections, SMOKE_SECTION: section})
    return only(check(with_section(probe, SMOKE_SECTION, **changes)), "gpu.cuda_smoke")


def test_cuda_in_the_image_works_on_all_gpus_or_fails() -> None:
    assert smoke("Unable to find image\ncuda works on 8").severity is OK
    assert smoke("cuda works on 7").severity is FAIL
    assert smoke("RuntimeError: no CUDA", exit_code=1).severity is FAIL
    assert smoke("cuda works on 8", exit_code=None, state=SectionState.TIMED_OUT).severity is UNKNOWN


def test_the_smoke_test_needs_an_image_and_takes_plain_words_only() -> None:
    text = cuda_smoke_section(ContainerConfig("docker", "burst:latest"))
    assert text is not None
    assert "docker run --rm --gpus all" in text
    assert cuda_smoke_section(ContainerConfig("bare", "burst:latest")) is None
    assert cuda_smoke_section(ContainerConfig("docker", None)) is None
    with pytest.raises(ValueError, match="word"):
        cuda_smoke_section(ContainerConfig("docker", "a\nEND\nreboot"))
