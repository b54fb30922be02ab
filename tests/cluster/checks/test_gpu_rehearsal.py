"""The real probe script in a real shell against the fake nvidia-smi of each profile, healthy and with faults."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_rehearsal import NODE, ask, bad, check, fixture_text, healthy, only, rehearse, write_files
from testkit.check_fakes import Groups

from cluster.checks.finding import Verdict
from cluster.checks.groups.gpu_log import read_errors
from cluster.survey.kernel_log import KERNEL_LOG, read_kernel_log
from cluster.survey.script import build_script, new_fence, read_sections
from cluster.survey.section import NodeProbe, SectionState
from cluster.testbed.hardware.devices import faults, models
from cluster.testbed.hardware.files import hardware_files, pci_folder
from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError

GROUP = Groups("gpu")

FAIL, WARN, UNKNOWN, OK = Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.OK
BLIND = {"gpu.cuda_smoke", "gpu.nvidia_smi", "gpu.lost", "gpu.xid", "gpu.sxid"}


@pytest.mark.parametrize("profile", models())
def test_a_healthy_node_passes_every_check(profile: str) -> None:
    findings = check(healthy(profile), gpus=8, gpu_model=profile[:4].upper())
    assert {found.check: found.severity for found in findings if found.severity is not OK} == {
        "gpu.cuda_smoke": Verdict.SKIP
    }
    assert all(section.ok for section in healthy(profile).sections.values())


def test_the_profile_none_has_nothing_and_is_skipped(tmp_path: Path) -> None:
    assert hardware_files("none", NODE, 1) == {}
    reader(tmp_path, "nvidia-smi", "exit 127")  # whatever this machine has
    probe = ask(tmp_path)
    assert [(found.check, found.severity) for found in check(probe)] == [("gpu.count", Verdict.SKIP)]
    assert ("gpu.nvidia_smi", None, FAIL) in bad(check(probe, gpus=8))


ONE_FAULT = [
    ("gpu_absent:3", "gpu.count", None, FAIL),
    ("ecc:2", "gpu.ecc", "GPU 2", FAIL),
    ("remap_pending:1", "gpu.row_remap", "GPU 1", FAIL),
    ("xid:79", "gpu.xid", "GPU 0", FAIL),
    ("xid:48:5", "gpu.xid", "GPU 5", FAIL),
    ("xid:31:4", "gpu.xid", "GPU 4", WARN),
    ("sxid", "gpu.sxid", "0000:f9:00.0", FAIL),
    ("busy:0", "gpu.busy", "GPU 0", FAIL),
    ("throttle:1", "gpu.throttle", "GPU 1", FAIL),
    ("pcie_width:5", "gpu.pcie", "GPU 5", FAIL),
    ("nvlink_down:6", "gpu.nvlink", "GPU 6", FAIL),
    ("no_fabric_manager", "gpu.fabric_manager", None, FAIL),
]


@pytest.mark.parametrize("profile", ["h100x8", "a100x8"])
@pytest.mark.parametrize(("fault", "name", "device", "severity"), ONE_FAULT)
def test_a_fault_gives_exactly_its_finding(
    tmp_path: Path, profile: str, fault: str, name: str, device: str | None, severity: Verdict
) -> None:
    findings = check(rehearse(tmp_path, profile, fault))
    assert bad(findings) == {(name, device, severity)}
    assert next(found for found in findings if found.severity is severity).remedy


def test_a_busy_gpu_names_program_process_owner_and_age(tmp_path: Path) -> None:
    found = [one for one in check(rehearse(tmp_path, "h100x8", "busy:0")) if one.check == "gpu.busy"]
    owner = (tmp_path / "root/proc/424242").owner()
    assert found[0].observed == f"71680 MiB in use: python3 (pid 424242) of {owner} since 9 days"


def test_memory_without_a_process_is_busy_and_says_how_to_find_its_owner(tmp_path: Path) -> None:
    findings = check(rehearse(tmp_path, "h100x8", "ghost:1"))
    assert bad(findings) == {("gpu.busy", "GPU 1", FAIL)}
    assert "fuser" in next(found.remedy for found in findings if found.severity is FAIL)


def test_another_driver_is_a_trait(tmp_path: Path) -> None:
    probe = rehearse(tmp_path, "h100x8", "driver:535.104.05")
    assert bad(check(probe)) == set()
    assert GROUP.traits(probe, ClusterConfig())["gpu.driver"] != GROUP.traits(healthy(), ClusterConfig())["gpu.driver"]


def test_a_lost_gpu_is_named_and_nothing_is_believed_of_the_others(tmp_path: Path) -> None:
    findings = check(rehearse(tmp_path, "h100x8", "gpu_lost:3"))
    assert bad(findings, FAIL) == {(f"gpu.{name}", "GPU 3", FAIL) for name in ("lost", "xid", "dcgm_diag")}
    assert {found.check for found in findings if found.severity is OK} == {"gpu.sxid"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [("smi_truncated", "cut off"), ("smi_missing", "not installed"), ("smi_hangs", "no answer")],
)
def test_a_nvidia_smi_that_does_not_answer_fails_and_leaves_all_else_unknown(
    tmp_path: Path, fault: str, words: str
) -> None:
    findings = check(rehearse(tmp_path, "h100x8", fault, limit_s=1 if fault == "smi_hangs" else 30))
    assert bad(findings, FAIL) == {("gpu.nvidia_smi", None, FAIL)}
    assert only(findings, "gpu.nvidia_smi").observed == f"nvidia-smi: {words}"
    others = {"gpu.xid", "gpu.sxid", *(("gpu.dcgm_health", "gpu.dcgm_diag") if fault != "smi_hangs" else ())}
    assert {found.check for found in findings if found.severity is OK} == others
    assert len(bad(findings, UNKNOWN)) == len({found.check for found in findings} - BLIND - others) + 1


def test_a_hanging_nvidia_smi_is_asked_once_and_does_not_outlive_the_probe(tmp_path: Path) -> None:
    probe = rehearse(tmp_path, "h100x8", "smi_hangs", limit_s=1)
    assert probe.section("gpu.smi").state is SectionState.TIMED_OUT
    assert probe.section("gpu.nvlink").state is SectionState.MISSING
    left = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _environment_names(pid, str(tmp_path))]  # noqa: PTH208
    assert left == []


def _environment_names(pid: str, folder: str) -> bool:
    try:
        return folder.encode() in Path(f"/proc/{pid}/environ").read_bytes() and int(pid) != os.getpid()
    except OSError:
        return False


def kernel_section(folder: Path, text: str) -> NodeProbe:
    write_files(folder, "h100x8")
    (folder / "root/var/log/kernel-gpus.log").write_text(text)
    return ask(folder)


def test_lines_of_a_real_kernel_log_reach_the_parser(tmp_path: Path) -> None:
    log = read_kernel_log(kernel_section(tmp_path, fixture_text("kernel.log")))
    errors = read_errors(log)
    assert log.reaches_boot
    assert errors.unread == []
    assert {(xid.address, xid.code): xid.count for xid in errors.xids} == {
        ("0000:0f:00.0", 94): 1,
        ("0000:0f:00.0", 64): 1,
        ("0000:43:00.0", 13): 2,
        ("0000:9d:00.0", 79): 1,
        ("0000:c3:00.0", 154): 1,
        ("0000:c3:00.0", 999): 1,
    }
    assert [(xid.code, xid.grade) for xid in errors.switch_xids] == [(12028, "non-fatal"), (22013, "fatal")]


def test_a_flood_of_one_error_hides_no_other(tmp_path: Path) -> None:
    flood = "[1.0] NVRM: Xid (PCI:0000:1b:00): 13, pid=1, name=a, Graphics Exception\n"
    fatal = "[2.0] NVRM: Xid (PCI:0000:43:00): 79, pid=1, GPU has fallen off the bus.\n"
    noise = "".join(f"[3.0] NVRM: something {number} about {'x' * (number % 300)}\n" for number in range(600))
    text = "Linux version 6\n" + flood * 3000 + fatal + noise + flood * 20000
    probe = kernel_section(tmp_path, text)
    xids = read_errors(read_kernel_log(probe)).xids
    assert {xid.code: xid.count for xid in xids} == {13: 23000, 79: 1}
    assert len(probe.section("kernel.log").output) < 100_000


def test_a_log_without_its_beginning_and_a_log_without_lines(tmp_path: Path) -> None:
    write_files(tmp_path, "h100x8")
    path = tmp_path / "root/var/log/kernel-gpus.log"
    path.with_name("kernel-fabric.log").unlink()
    path.write_text("[900.0] usb 1-1: new device\n")
    assert bad(check(ask(tmp_path))) == {("gpu.xid", None, WARN), ("gpu.sxid", None, WARN)}
    path.write_text("")
    assert bad(check(ask(tmp_path))) == {("gpu.xid", None, UNKNOWN), ("gpu.sxid", None, UNKNOWN)}
    path.unlink()
    assert bad(check(ask(tmp_path))) == {("gpu.xid", None, UNKNOWN), ("gpu.sxid", None, UNKNOWN)}


# Those of them that this machine has.
SHELLS = [shell for shell in (("sh",), ("dash",), ("bash", "--posix"), ("busybox", "sh")) if shutil.which(shell[0])]


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_the_probe_runs_in_every_posix_shell(tmp_path: Path, shell: tuple[str, ...]) -> None:
    program = shutil.which(shell[0])
    assert program is not None
    write_files(tmp_path, "h100x8", ("ecc:2", "busy:0"))
    # Sections start `sh`: it has to be the same shell, too.
    link = tmp_path / "bin" / "sh"
    link.write_text(f'#!{program} {"sh" if shell[0] == "busybox" else ""}\nexec {program} {" ".join(shell[1:])} "$@"\n')
    link.chmod(0o755)
    findings = check(ask(tmp_path, shell=(program, *shell[1:])))
    assert bad(findings) == {("gpu.ecc", "GPU 2", FAIL), ("gpu.busy", "GPU 0", FAIL)}


def reader(folder: Path, name: str, body: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def ask_real_log(folder: Path) -> NodeProbe:
    """The section of the kernel log as on a real node: without a rehearsal tree, with `folder`/bin first in PATH."""
    fence, environment = new_fence(), {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    script = build_script([KERNEL_LOG], fence)
    answer = subprocess.run(["sh", "-s"], input=script, capture_output=True, env=environment, timeout=200)
    return NodeProbe(NODE, read_sections(answer.stdout, fence))


BOOT = "kernel: Linux version 6.1\\n"
XID = "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\\n"


def test_the_journal_is_read_before_the_buffer_of_the_kernel(tmp_path: Path) -> None:
    reader(tmp_path, "journalctl", f"printf '{BOOT}{XID}'")
    reader(tmp_path, "dmesg", "echo '[9.0] nothing of interest'")
    log = read_kernel_log(ask_real_log(tmp_path))
    assert (log.reader, [xid.code for xid in read_errors(log).xids]) == ("journalctl", [79])


@pytest.mark.parametrize(
    "journal",
    [
        "exit 0",
        "echo 'No journal files were opened due to insufficient permissions.'; exit 1",
        "echo '-- No entries --'",
        "echo 'Hint: You are currently not seeing messages from other users.'",
    ],
)
def test_a_journal_that_shows_nothing_is_no_clean_journal(tmp_path: Path, journal: str) -> None:
    reader(tmp_path, "journalctl", journal)
    reader(tmp_path, "dmesg", f"printf '{BOOT}{XID}'")
    log = read_kernel_log(ask_real_log(tmp_path))
    assert (log.reader, [xid.code for xid in read_errors(log).xids]) == ("dmesg", [79])


@pytest.mark.parametrize(
    "said", ["echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1", "exit 0", "exit 127"]
)
def test_a_kernel_log_that_may_not_be_read_is_unknown_with_the_reason(tmp_path: Path, said: str) -> None:
    reader(tmp_path, "journalctl", "exit 1")
    reader(tmp_path, "dmesg", said)
    probe = ask_real_log(tmp_path)
    found = only(check(NodeProbe(NODE, {**healthy().sections, **probe.sections})), "gpu.xid")
    assert (found.severity, "not permitted" in found.evidence) == (UNKNOWN, "permitted" in said)


def test_nodes_differ_in_uuids_and_in_nothing_else() -> None:
    first, again, other = (hardware_files("h100x8", node, 1) for node in ("n1", "n1", "n2"))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"bin/nvidia-smi"}


def test_the_pci_tree_leads_to_each_gpu() -> None:
    files = hardware_files("a100x8", NODE, 1)
    folder = pci_folder(models()["a100x8"].gpu_path(5))
    assert files["root/sys/bus/pci/devices/0000:90:00.0"].link_to == f"../../../{folder.removeprefix('sys/')}"
    assert files[f"root/{folder}/vendor"].text == "0x10de\n"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ecc:8", "8 GPUs"),
        ("ecc", "GPU N"),
        ("ecc:-1", "GPU N"),
        ("sxid:1", "NVSwitch"),
        ("driver:", "VERSION"),
        ("driver:$(reboot)", "VERSION"),
        ("xid:a", "CODE"),
        ("xid:79:8", "CODE"),
        ("melted:1", "gpu_lost"),
        ("port_down:mlx5_99", "there are mlx5_0"),
        ("port_down:rail8", "there are mlx5_0"),
        ("port_down", "there are mlx5_0"),
        ("roce:1", "RoCE"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(fault: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hardware_files("h100x8", NODE, 1, (fault,))


def test_unknown_profiles_and_faults_without_hardware_are_refused() -> None:
    with pytest.raises(ConfigError, match="h100x8"):
        hardware_files("h1000", NODE, 1)
    with pytest.raises(ConfigError, match="no fake hardware"):
        hardware_files("none", NODE, 1, ("ecc:1",))


def test_every_fault_of_gpus_is_tried() -> None:
    tried = {fault.partition(":")[0] for fault, *_ in ONE_FAULT}
    tried |= {"ghost", "driver", "gpu_lost", "smi_truncated", "smi_missing", "smi_hangs"}
    assert tried <= set(faults())
    # test_fabric_probe.py and test_gpu_dcgm.py try the others.
    others = {"roce", "no_peermem", "dcgm", "no_dcgm"}
    assert {name for name in set(faults()) - tried if faults()[name].about != "DEV"} == others


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        (["--query-gpu=index,memory.total", "--format=csv,noheader,nounits"], "0, 81559"),
        (["--query-gpu=name,driver_version", "--format=csv"], "name, driver_version"),
        (["--query-gpu=nonsense", "--format=csv,noheader"], 'Field "nonsense" is not a valid field to query.'),
        (["--frobnicate"], "Invalid combination of input arguments."),
    ],
)
def test_the_fake_tool_answers_what_scripts_ask(tmp_path: Path, arguments: list[str], first_line: str) -> None:
    write_files(tmp_path, "h100x8")
    run = subprocess.run([tmp_path / "bin/nvidia-smi", *arguments], capture_output=True, text=True)
    assert run.stdout.splitlines()[0].strip() == first_line
    assert (run.returncode == 0) == ("valid" not in first_line)


def test_the_list_of_the_fake_tool(tmp_path: Path) -> None:
    write_files(tmp_path, "h200x8")
    run = subprocess.run([tmp_path / "bin/nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    assert [line.partition(" (")[0] for line in run.stdout.splitlines()] == [f"GPU {k}: NVIDIA H200" for k in range(8)]
