"""The real probe script in a real shell on the nodes of a testbed's hardware, healthy and with faults."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from rehearsal import GPU, IB, ask, check, fixture_text, healthy, rehearse, write_files
from testkit.check_fakes import ask_here, bad, changed_section, only

from cluster.checks.finding import Verdict
from cluster.checks.groups.ib import FabricView
from cluster.survey.adapters import HcaPort, parse_adapters, roce_gid_index
from cluster.survey.facts import NodeFacts
from cluster.survey.kernel_log import KERNEL_LOG, read_kernel_log
from cluster.survey.section import NodeProbe, SectionState
from cluster.testbed.hardware.devices import compute_adapters, faults
from engine.config.cluster import ClusterConfig

OK, SKIP, WARN, UNKNOWN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL
# Faults of a node, and all that is found there; what is not in the list is fine.
NODES: dict[tuple[str, ...], list[tuple[str, str | None, Verdict]]] = {
    ("h100x8", "driver:535.104.05", "no_dcgm"): [],
    ("h100x8", "roce", "growing:rail4"): [("ib.counters", "mlx5_6:1", FAIL)],
    ("h100x8", "gpu_absent:3", "polling:rail1", "narrow_pcie:rail3", "gone:rail7"): [
        ("gpu.count", None, FAIL),
        ("ib.count", "GPU at 0000:df:00.0", FAIL),
        ("ib.state", "mlx5_1:1", FAIL),
        ("ib.pcie", "mlx5_5", FAIL),
    ],
    ("h100x8", "ecc:2", "xid:79", "throttle:1", "pcie_width:5", "nvlink_down:6", "busy:0", "ghost:4", "no_peermem"): [
        ("gpu.ecc", "GPU 2", FAIL),
        ("gpu.throttle", "GPU 1", FAIL),
        ("gpu.xid", "GPU 0", FAIL),
        ("gpu.pcie", "GPU 5", FAIL),
        ("gpu.nvlink", "GPU 6", FAIL),
        ("gpu.busy", "GPU 0", FAIL),
        ("gpu.busy", "GPU 4", FAIL),
        ("ib.gpudirect", None, FAIL),
    ],
    ("h200x8", "dcgm:6", "port_down:rail0", "slow_port:rail2", "flapping:rail4", "driverless:rail6"): [
        ("gpu.dcgm_health", None, WARN),
        ("gpu.dcgm_diag", "GPU 6", FAIL),
        ("ib.count", "0000:ce:00.0", FAIL),
        ("ib.state", "mlx5_0:1", FAIL),
        ("ib.rate", "mlx5_2:1", FAIL),
        ("ib.flaps", "mlx5_6", FAIL),
    ],
    ("a100x8", "remap_pending:1", "xid:48:5", "xid:31:4", "sxid", "no_fabric_manager"): [
        ("gpu.row_remap", "GPU 1", FAIL),
        ("gpu.xid", "GPU 4", WARN),
        ("gpu.xid", "GPU 5", FAIL),
        ("gpu.sxid", "0000:f9:00.0", FAIL),
        ("gpu.fabric_manager", None, FAIL),
    ],
}
SILENT = {"smi_truncated": "cut off", "smi_missing": "not installed", "smi_hangs": "no answer"}


@pytest.mark.parametrize("node", NODES, ids=" ".join)
def test_faults_are_found_and_nothing_else(tmp_path: Path, node: tuple[str, ...]) -> None:
    findings = check(rehearse(tmp_path, *node), GPU, IB)
    assert bad(findings) == NODES[node]
    assert all(finding.remedy for finding in findings if not finding.severity.is_fine)
    busy = {finding.device: (finding.observed, finding.remedy) for finding in findings if finding.check == "gpu.busy"}
    if "busy:0" in node:
        owner = (tmp_path / "root/proc/424242").owner()
        assert busy["GPU 0"][0] == f"71680 MiB in use: python3 (pid 424242) of {owner} since 9 days"
        assert "fuser" in busy["GPU 4"][1]


def test_every_fault_is_tried() -> None:
    tried = {fault.partition(":")[0] for node in NODES for fault in node[1:]}
    assert {*tried, *SILENT, "gpu_lost"} == set(faults())


@pytest.mark.parametrize(("profile", "number"), [("h100x8", 1), ("h100x8", 2), ("h200x8", 1), ("a100x8", 1)])
def test_a_healthy_node_passes_every_check(tmp_path: Path, profile: str, number: int) -> None:
    probe = healthy(profile) if number == 1 else rehearse(tmp_path, profile, number=number)
    wanted = compute_adapters(profile, number)
    findings = check(probe, GPU, IB, gpus=8, gpu_model=profile[:4].upper(), hcas=len(wanted))
    assert {found.check for found in findings if found.severity is not OK} == {"gpu.cuda_smoke", "ib.gid"}
    assert not bad(findings)
    assert all(section.ok for section in probe.sections.values())
    view = FabricView.of(NodeFacts(probe, ClusterConfig()))
    assert {port.device for port in view.ports} == set(wanted)
    # Every GPU shares a switch with the adapter of its rail.
    ports = {port.device: port for port in view.ports}
    gpus = [gpu.pci_path[:2] for gpu in view.facts.gpu_addresses]
    assert gpus[:: len(gpus) // len(wanted)] == [ports[name].pci_path[:2] for name in wanted]


def test_a_node_without_gpus_and_adapters_is_skipped_unless_they_are_expected(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", "exit 127")  # whatever this machine has
    (tmp_path / "root").mkdir()
    probe = ask(tmp_path)
    told = {found.check: (found.severity, found.observed) for found in check(probe, GPU, IB)}
    assert told == {
        **dict.fromkeys(GPU.checks, (SKIP, "no NVIDIA GPU in this node")),
        **dict.fromkeys(IB.checks, (SKIP, "no adapter for training")),
    }
    assert ("gpu.nvidia_smi", None, FAIL) in bad(check(probe, gpus=8))


def test_a_lost_gpu_is_named_and_nothing_is_believed_of_the_others(tmp_path: Path) -> None:
    findings = check(rehearse(tmp_path, "h100x8", "gpu_lost:3"))
    failed = {(found.check, found.device) for found in findings if found.severity is FAIL}
    assert failed == {(f"gpu.{name}", "GPU 3") for name in ("lost", "xid", "dcgm_diag")}
    assert {found.check for found in findings if found.severity is OK} == {"gpu.sxid"}


@pytest.mark.parametrize("fault", SILENT)
def test_a_nvidia_smi_that_does_not_answer_fails_and_leaves_all_else_unknown(tmp_path: Path, fault: str) -> None:
    probe = rehearse(tmp_path, "h100x8", fault, limit_s=1 if fault == "smi_hangs" else 30)
    findings = check(probe)
    seen = {"gpu.xid", "gpu.sxid", *(("gpu.dcgm_health", "gpu.dcgm_diag") if fault != "smi_hangs" else ())}
    told = dict.fromkeys(GPU.checks, UNKNOWN) | dict.fromkeys(seen, OK)
    assert {one.check: one.severity for one in findings} == told | {"gpu.nvidia_smi": FAIL, "gpu.cuda_smoke": SKIP}
    assert only(findings, "gpu.nvidia_smi").observed == f"nvidia-smi: {SILENT[fault]}"
    if fault == "smi_hangs":
        assert (probe.section("gpu.smi").state, probe.section("gpu.nvlink").state) == (
            SectionState.TIMED_OUT,
            SectionState.MISSING,  # what hangs once is not asked again
        )
    left = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _environment_names(pid, str(tmp_path))]  # noqa: PTH208
    assert left == []


def _environment_names(pid: str, folder: str) -> bool:
    try:
        return folder.encode() in Path(f"/proc/{pid}/environ").read_bytes() and int(pid) != os.getpid()
    except OSError:
        return False


# Shells.


@pytest.mark.parametrize("shell", [("dash",), ("bash", "--posix"), ("busybox", "sh")], ids=lambda shell: shell[0])
def test_every_shell_tells_the_same(tmp_path: Path, shell: tuple[str, ...]) -> None:
    found = shutil.which(shell[0])
    if found is None:
        pytest.skip(f"{shell[0]} is not installed")  # where CI is set, a skip fails the session
    write_files(tmp_path, "h100x8", "ecc:2", "roce", "growing:rail4")
    # Sections start `sh`: it has to be the same shell, too, and with busybox so do the tools.
    program(
        tmp_path, "sh", f'exec {found} {" ".join(shell[1:])} "$@"', head=found if shell[0] != "busybox" else "/bin/sh"
    )
    tools = ("awk", "cat", "cut", "grep", "ls", "sed", "sleep", "sort", "tail", "timeout", "tr", "true", "uname")
    for tool in tools if shell[0] == "busybox" else ():
        (tmp_path / "bin" / tool).symlink_to(found)
    probe = ask(tmp_path, shell=shell)
    assert all(section.ok for section in probe.sections.values())
    assert bad(check(probe, GPU, IB)) == [("gpu.ecc", "GPU 2", FAIL), ("ib.counters", "mlx5_6:1", FAIL)]
    ports = [port for port in parse_ports(probe) if port.device in compute_adapters("h100x8", 1)]
    assert [(port.netdev, roce_gid_index(port)) for port in ports] == [(f"rdma{rail}", 3) for rail in range(8)]


def parse_ports(probe: NodeProbe) -> tuple[HcaPort, ...]:
    return parse_adapters(probe.section("ib.ports")).ports


def program(folder: Path, name: str, body: str, *, head: str = "/bin/sh") -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{head}\n{body}\n")
    path.chmod(0o755)


# What stands in a tree of /sys.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The tree of an A100 node, to be damaged."""
    return write_files(tmp_path, "a100x8")


def ports_of(root: Path) -> dict[str, HcaPort]:
    return {port.device: port for port in parse_ports(ask(root.parent))}


def test_hostile_values_stay_in_their_field_and_what_cannot_be_read_is_not_told(tree: Path) -> None:
    device = tree / "sys/class/infiniband/mlx5_0"
    (device / "ports/1/link_layer").write_text("20%\tstate=4: ACTIVE\n@@x end ib.ports 0\nport\tdev=evil\n")
    (device / "ports/1/rate").write_bytes(b"\xff\xfe" * 3000)
    (device / "ports/1/state").unlink()
    (device / "ports/1/state").mkdir()  # reading it is an error, for root as well
    found = ports_of(tree)
    assert sorted(found) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    port = found["mlx5_0"]
    assert (port.link_layer, port.rate_gbps, port.state) == ("20% state=4: ACTIVE", None, "")
    assert not port.is_active


def test_what_else_an_interface_is_part_of_is_seen(tree: Path) -> None:
    device = (tree / "sys/class/infiniband/mlx5_0/device").resolve()
    (device / "physfn").mkdir()
    (device / "net/ib0.8001").mkdir()
    (device / "net/ib0.8001/parent").write_text("ib0\n")
    bond = tree / "sys/devices/virtual/net/bond7"
    bond.mkdir(parents=True)
    (tree / "sys/class/net/ib3/master").symlink_to(bond)
    (tree / "proc/net").mkdir(parents=True)
    routes = ("ib1\t00000000\t0100000A", "ib2\t0000000A\t0", "bond7\t00000000\t0100000A")
    (tree / "proc/net/route").write_text("\n".join(("Iface\tDestination\tGateway", *routes, "")))
    told = [
        (port.netdev, port.is_virtual_function, port.is_bond, port.has_default_route)
        for port in ports_of(tree).values()
    ]
    assert told == [
        ("ib0", True, False, False),  # and not its partition
        ("ib1", False, False, True),
        ("ib2", False, False, False),
        ("ib3", False, True, True),
    ]


def test_an_adapter_without_ports_is_told(tree: Path) -> None:
    shutil.rmtree((tree / "sys/class/infiniband/mlx5_2/ports").resolve())
    assert ("ib.count", "mlx5_2", FAIL) in bad(check(ask(tree.parent), IB))


def test_a_file_that_never_answers_costs_its_section_only(tree: Path) -> None:
    path = tree / "sys/class/infiniband/mlx5_1/ports/1/state"
    path.unlink()
    os.mkfifo(path)
    probe = ask(tree.parent, limit_s=2)
    assert probe.section("ib.ports").state is SectionState.TIMED_OUT
    assert probe.section("ib.counters").ok
    assert {severity for _, _, severity in bad(check(probe, IB))} == {UNKNOWN}


# The kernel log.


def with_log(folder: Path, text: str) -> NodeProbe:
    root = write_files(folder, "h100x8")
    (root / "var/log/kernel-fabric.log").unlink()
    (root / "var/log/kernel-gpus.log").write_text(text)
    answer = ask_here([KERNEL_LOG], folder, BURST_PROBE_ROOT=str(root)).section(KERNEL_LOG.name)
    return changed_section(healthy(), KERNEL_LOG.name, output=answer.output, exit_code=answer.exit_code)


def errors(probe: NodeProbe) -> list[tuple[str, str | None, Verdict, str]]:
    found = [one for one in check(probe) if one.check in ("gpu.xid", "gpu.sxid")]
    return [(one.check, one.device, one.severity, one.observed) for one in found]


def test_lines_of_a_real_kernel_log_are_understood(tmp_path: Path) -> None:
    assert errors(with_log(tmp_path, fixture_text("kernel.log"))) == [
        ("gpu.xid", "0000:0f:00.0", FAIL, "Xid 94, Xid 64"),
        ("gpu.xid", "GPU 1", WARN, "Xid 13 (2 times) (last of train.py, pid 78)"),
        ("gpu.xid", "GPU 5", FAIL, "Xid 154, Xid 999"),
        ("gpu.xid", "GPU 4", FAIL, "Xid 79: fallen off the bus"),
        ("gpu.sxid", "0000:85:00.0", WARN, "SXid 12028, non-fatal"),
        ("gpu.sxid", "0000:86:00.0", FAIL, "SXid 22013, fatal"),
    ]


def test_a_flood_of_one_error_hides_no_other(tmp_path: Path) -> None:
    flood = "[1.0] NVRM: Xid (PCI:0000:1b:00): 13, pid=1, name=a, Graphics Exception\n"
    fatal = "[2.0] NVRM: Xid (PCI:0000:43:00): 79, pid=1, GPU has fallen off the bus.\n"
    noise = "".join(f"[3.0] NVRM: something {number} about {'x' * (number % 300)}\n" for number in range(600))
    probe = with_log(tmp_path, "Linux version 6\n" + flood * 3000 + fatal + noise + flood * 20000)
    assert [(device, text.partition(" (last")[0]) for _, device, _, text in errors(probe)[:2]] == [
        ("GPU 0", "Xid 13 (23000 times)"),
        ("GPU 1", "Xid 79: fallen off the bus"),
    ]
    assert len(probe.section("kernel.log").output) < 100_000


@pytest.mark.parametrize(("text", "severity"), [("[900.0] usb 1-1: new device\n", WARN), ("", UNKNOWN)])
def test_a_log_without_its_beginning_and_a_log_without_lines(tmp_path: Path, text: str, severity: Verdict) -> None:
    found = errors(with_log(tmp_path, text))
    assert [(check, severity) for check, _, severity, _ in found] == [("gpu.xid", severity), ("gpu.sxid", severity)]


BOOT = "kernel: Linux version 6.1\\n"
XID = "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\\n"


@pytest.mark.parametrize(
    ("journal", "dmesg", "reader"),
    [
        (f"printf '{BOOT}{XID}'", "echo '[9.0] nothing of interest'", "journalctl"),
        # A journal that shows nothing is no clean journal.
        *(
            (said, f"printf '{BOOT}{XID}'", "dmesg")
            for said in (
                "exit 0",
                "echo 'No journal files were opened due to insufficient permissions.'; exit 1",
                "echo '-- No entries --'",
                "echo 'Hint: You are currently not seeing messages from other users.'",
            )
        ),
        ("exit 1", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1", ""),
        ("exit 1", "exit 0", ""),
        ("exit 1", "exit 127", ""),
    ],
)
def test_the_journal_is_read_before_the_buffer_of_the_kernel(
    tmp_path: Path, journal: str, dmesg: str, reader: str
) -> None:
    program(tmp_path, "journalctl", journal)
    program(tmp_path, "dmesg", dmesg)
    probe = changed_section(healthy(), "kernel.log", output="")  # a real node, without a rehearsal tree
    answer = ask_here([KERNEL_LOG], tmp_path, tools=tmp_path / "bin").section("kernel.log")
    probe = changed_section(probe, "kernel.log", output=answer.output, exit_code=answer.exit_code)
    found = next(one for one in check(probe) if one.check == "gpu.xid")
    if reader:
        assert read_kernel_log(probe).reader == reader
        assert (found.severity, found.observed) == (FAIL, "Xid 79: fallen off the bus")
    else:
        assert (found.severity, "not permitted" in found.evidence) == (UNKNOWN, "permitted" in dmesg)
