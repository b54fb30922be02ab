"""The real probe script in a real shell on the nodes of a testbed's hardware, healthy and with faults."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from testkit import write_program
from testkit.check_fakes import ask_here, bad, changed_section, only, told
from whole_node import ask, changed, check, fixture_text, groups, healthy, in_groups, rehearse, write_files

from cluster.checks.check import Verdict
from cluster.checks.groups.ib import FabricView
from cluster.survey.drivers import KERNEL_LOG, GpuAddress, read_kernel_log
from cluster.survey.facts import NodeFacts
from cluster.survey.rdma import HcaPort, parse_adapters
from cluster.survey.section import NodeProbe, SectionState
from cluster.testbed.hardware.devices import compute_adapters, gpu_path, hardware_table
from engine.config.cluster import ClusterConfig, ExpectedHardware

OK, SKIP, WARN, UNKNOWN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL
# Faults of a node, and all that is found there; what is not in the list is fine.
NODES: dict[tuple[str, ...], list[str]] = {
    ("h100x8", "driver:535.104.05", "no_dcgm"): [],
    ("h100x8", "roce", "growing:rail4"): [
        "FAIL ib.counters (mlx5_6:1): errors are being counted: port_rcv_errors +12, symbol_error +4711",
    ],
    ("h100x8", "gpu_absent:3", "polling:rail1", "narrow_pcie:rail3", "gone:rail7"): [
        "FAIL gpu.count: 7 by nvidia-smi, 7 by driver, 8 by PCI; expected: 8 GPUs",
        "FAIL ib.state (mlx5_1:1): DOWN, Polling; expected: ACTIVE, LinkUp",
        "FAIL ib.pcie (mlx5_5): x8 at 32 GT/s; expected: x16",
    ],
    ("h100x8", "ecc:2", "xid:79", "throttle:1", "pcie_width:5", "nvlink_down:6", "busy:0", "ghost:4", "no_peermem"): [
        "FAIL gpu.ecc (GPU 2): 2 uncorrectable ECC errors since the driver loaded; expected: 0",
        "FAIL gpu.throttle (GPU 1): slowed down: hw slowdown, hw thermal slowdown; expected: full clocks",
        "FAIL gpu.xid (GPU 0): Xid 79; expected: none since boot",
        "FAIL gpu.pcie (GPU 5): 8 PCIe lanes; expected: 16 lanes",
        "FAIL gpu.nvlink (GPU 6): NVLink 5 inactive; expected: 18 links up",
        "FAIL gpu.busy (GPU 0): 71680 MiB in use: python3 (pid 424242) of OWNER since 9 days; expected: a free GPU",
        "FAIL gpu.busy (GPU 4): 20480 MiB in use: no process visible; expected: a free GPU",
        "FAIL ib.gpudirect: adapters cannot reach GPU memory; expected: nvidia_peermem, or DMA-BUF of the open driver",
    ],
    ("h200x8", "dcgm:6", "port_down:rail0", "slow_port:rail2", "flapping:rail4", "driverless:rail6"): [
        "WARN gpu.dcgm_health: Warning, says DCGM; GPU 6 PCIe system: "
        "Detected more than 8 PCIe replays per minute"
        "; expected: Healthy",
        "FAIL gpu.dcgm_diag (GPU 6): software: Detected more than 8 PCIe replays per minute"
        "; expected: every test passed",
        "FAIL ib.count (0000:ce:00.0): the InfiniBand adapter has no driver",
        "FAIL ib.state (mlx5_0:1): DOWN, Disabled; expected: ACTIVE, LinkUp",
        "FAIL ib.rate (mlx5_2:1): 100 Gb/s; expected: 400 Gb/s",
        "FAIL ib.log (mlx5_6): its link was lost 3 times within a day, the last 65 min ago",
    ],
    ("a100x8", "remap_pending:1", "xid:48:5", "xid:31:4", "sxid", "no_fabric_manager"): [
        "FAIL gpu.row_remap (GPU 1): a row remapping waits for a reset; expected: nothing pending",
        "WARN gpu.xid (GPU 4): Xid 31; expected: none since boot",
        "FAIL gpu.xid (GPU 5): Xid 48; expected: none since boot",
        "FAIL gpu.xid (0000:f9:00.0): SXid 20034, fatal; expected: none since boot",
        "FAIL gpu.fabric: fabric manager does not run; expected: running",
    ],
}
CONFIG = ClusterConfig()
SILENT = {"smi_truncated": "no whole answer", "smi_missing": "not installed", "smi_hangs": "no answer"}


@pytest.mark.parametrize("node", NODES, ids=" ".join)
def test_faults_are_found_and_nothing_else(tmp_path: Path, node: tuple[str, ...]) -> None:
    findings = in_groups(check(rehearse(tmp_path, *node)), "gpu", "ib")
    owner = (tmp_path / "bin/nvidia-smi").owner()
    assert sorted(line.replace(f"of {owner} since", "of OWNER since") for line in told(findings)) == sorted(NODES[node])
    assert all(finding.remedy for finding in findings if not finding.severity.is_fine)


def test_every_fault_is_tried() -> None:
    tried = {fault.partition(":")[0] for node in NODES for fault in node[1:]}
    assert {*tried, *SILENT, "gpu_lost"} == set(hardware_table("faults"))


@pytest.mark.parametrize(("profile", "number"), [("h100x8", 1), ("h200x8", 2), ("a100x8", 1)])
def test_a_healthy_node_passes_every_check(tmp_path: Path, profile: str, number: int) -> None:
    probe = healthy(profile) if number == 1 else rehearse(tmp_path, profile, number=number)
    wanted = compute_adapters(profile, number)
    expected = ExpectedHardware(gpus=8, gpu_model=profile[:4].upper(), hcas=len(wanted))
    findings = in_groups(check(probe, ClusterConfig(expected=expected)), "gpu", "ib")
    assert {found.check for found in findings if found.severity is not OK} == {"ib.gid", "ib.mtu"}
    assert not bad(findings)
    assert all(section.ok for section in probe.sections.values())
    view = FabricView.of(NodeFacts(probe, CONFIG))
    assert {port.device for port in view.ports} == set(wanted)
    gpus = view.facts.gpu_addresses
    told = [(gpu.index, gpu.pci_path, gpu.numa_node) for gpu in gpus]
    assert told == [(k, gpu_path(profile, k), k // 4) for k in range(8)]
    # Every GPU shares a switch with the adapter of its rail.
    ports = {port.device: port for port in view.ports}
    assert [gpu.pci_path[:2] for gpu in gpus[:: 8 // len(wanted)]] == [ports[name].pci_path[:2] for name in wanted]
    assert [gpu.numa_node for gpu in gpus[:: 8 // len(wanted)]] == [ports[name].numa_node for name in wanted]


def test_a_lost_gpu_is_named_and_nothing_is_believed_of_the_others(tmp_path: Path) -> None:
    findings = in_groups(check(rehearse(tmp_path, "h100x8", "gpu_lost:3")), "gpu")
    failed = {(found.check, found.device) for found in findings if found.severity is FAIL}
    assert failed == {(f"gpu.{name}", "GPU 3") for name in ("nvidia_smi", "xid", "dcgm_diag")}
    assert {found.check for found in findings if found.severity is OK} == set()


@pytest.mark.parametrize("fault", SILENT)
def test_a_nvidia_smi_that_does_not_answer_fails_and_leaves_all_else_unknown(tmp_path: Path, fault: str) -> None:
    probe = rehearse(tmp_path, "h100x8", fault, limit_s=1 if fault == "smi_hangs" else 30)
    findings = in_groups(check(probe), "gpu")
    seen = {"gpu.xid", *(("gpu.dcgm_health", "gpu.dcgm_diag") if fault != "smi_hangs" else ())}
    told = dict.fromkeys((name for group in groups("gpu") for name in group.checks), UNKNOWN) | dict.fromkeys(seen, OK)
    assert {one.check: one.severity for one in findings} == told | {"gpu.nvidia_smi": FAIL}
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


# What stands in a tree of /sys.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The tree of an A100 node, to be damaged."""
    return write_files(tmp_path, "a100x8")


def ports_of(root: Path) -> dict[str, HcaPort]:
    return {port.device: port for port in parse_adapters(ask(root.parent).section("ib.ports")).ports}


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
    (tree / "sys/class/net/ib3/upper_bond7").symlink_to(bond)
    (tree / "proc/net").mkdir(parents=True)
    routes = ("ib1\t00000000\t0100000A", "ib2\t0000000A\t0", "bond7\t00000000\t0100000A")
    (tree / "proc/net/route").write_text("\n".join(("Iface\tDestination\tGateway", *routes, "")))
    told = [
        (port.netdev, port.is_virtual_function, port.is_bond, port.default_route) for port in ports_of(tree).values()
    ]
    assert told == [
        ("ib0", True, False, ""),  # and not its partition
        ("ib1", False, False, "ib1"),
        ("ib2", False, False, ""),
        ("ib3", False, True, "bond7"),
    ]


def test_drivers_without_error_counters_skip_the_check(tree: Path) -> None:
    # As EFA, bnxt_re, irdma, mana and soft RoCE show their ports: no folder `counters` (drivers without process_mad).
    for counters in (tree / "sys/class/infiniband").glob("*/ports/1/counters"):
        shutil.rmtree(counters.resolve())
    found = [one for one in check(ask(tree.parent)) if one.check == "ib.counters"]
    assert {one.severity for one in found} == {SKIP}, found


def test_error_counters_that_cannot_be_read_are_unknown(tree: Path) -> None:
    counters = tree / "sys/class/infiniband/mlx5_0/ports/1/counters"
    for file in counters.iterdir():
        file.unlink()
        file.mkdir()  # reading it is an error, for root as well
    assert ("ib.counters", "mlx5_0:1", UNKNOWN) in bad(check(ask(tree.parent)))


def test_iwarp_is_told_from_roce_by_the_node_type(tree: Path) -> None:
    # sysfs of siw and of RoCE differ in node_type alone (drivers/infiniband/core/sysfs.c: node_type_show).
    for name, kind in (("mlx5_0", "4: RNIC"), ("mlx5_1", "1: CA")):
        (tree / f"sys/class/infiniband/{name}/ports/1/link_layer").write_text("Ethernet\n")
        (tree / f"sys/class/infiniband/{name}/node_type").write_text(f"{kind}\n")
    assert {name for name, port in ports_of(tree).items() if port.is_iwarp} == {"mlx5_0"}


def test_an_adapter_without_ports_is_told(tree: Path) -> None:
    shutil.rmtree((tree / "sys/class/infiniband/mlx5_2/ports").resolve())
    assert ("ib.count", "mlx5_2", FAIL) in bad(check(ask(tree.parent)))


# The kernel log, from a file, a journal or dmesg.


def with_log(folder: Path, text: str | None = None) -> NodeProbe:
    """A healthy node with that log; None: with what the programs of the folder print."""
    if text is None:
        answer = ask_here([KERNEL_LOG], folder, tools=folder / "bin")
    else:
        (old := write_files(folder, "h100x8") / "var/log/kernel-fabric.log").unlink()
        (old.parent / "kernel-gpus.log").write_text(text)
        answer = ask_here([KERNEL_LOG], folder, BURST_PROBE_ROOT=str(folder / "root"))
    log = answer.section(KERNEL_LOG.name)
    return changed_section(healthy(), KERNEL_LOG.name, output=log.output, exit_code=log.exit_code)


def errors(probe: NodeProbe) -> list[tuple[str | None, Verdict, str]]:
    return [(one.device, one.severity, one.observed) for one in check(probe) if one.check == "gpu.xid"]


def test_lines_of_a_real_kernel_log_are_understood(tmp_path: Path) -> None:
    assert sorted(errors(with_log(tmp_path, fixture_text("kernel.log")))) == [
        ("0000:0f:00.0", FAIL, "Xid 94, Xid 64"),
        ("0000:85:00.0", WARN, "SXid 12028, non-fatal"),
        ("0000:86:00.0", FAIL, "SXid 22013, fatal"),
        ("GPU 1", WARN, "Xid 13 (2 times)"),
        ("GPU 4", FAIL, "fallen off the bus"),
        ("GPU 5", FAIL, "Xid 154, Xid 999"),
    ]


def test_a_flood_of_one_error_hides_no_other(tmp_path: Path) -> None:
    flood = "[1.0] NVRM: Xid (PCI:0000:1b:00): 13, pid=1, name=a, Graphics Exception\n"
    fatal = "[2.0] NVRM: Xid (PCI:0000:43:00): 79, pid=1, GPU has fallen off the bus.\n"
    noise = "".join(f"[3.0] NVRM: odd Xid {chr(97 + number % 26) * number}\n" for number in range(1, 600))
    probe = with_log(tmp_path, "Linux version 6\n" + flood * 3000 + fatal + noise + flood * 20000)
    assert errors(probe)[:2] == [("GPU 0", WARN, "Xid 13 (23000 times)"), ("GPU 1", FAIL, "Xid 79")]


def test_fatal_nvlink_error_is_not_hidden_by_a_later_one_that_is_not(tmp_path: Path) -> None:
    # Lines of a GB200 with driver 570: the same Xid, first fatal, then not.
    link = "XC0 i0 Link 09 (0x025525c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"
    lines = [f"[{at}.1] NVRM: Xid (PCI:0000:43:00): 145, RLW_REMAP  {grade}  {link}" for at, grade in GRADES]
    found = errors(with_log(tmp_path, "\n".join(["Linux version 6", *lines, ""])))
    assert [one[:2] for one in found] == [("GPU 1", FAIL)], found


def test_driver_errors_without_xid_are_read_from_the_kernel_log(tmp_path: Path) -> None:
    reset = "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)"
    setup = "NVRM: GPU 0000:{}:00.0: RmInitAdapter failed! (0x62:0x40:2028)"
    lines = ["Linux version 6", f"[5.1] {reset} returned from status @ kernel_channel.c:2874", ""]
    lines[1:1] = [f"[4.2] {setup.format(bus)}" for bus in ("1b", "43")]
    found = errors(with_log(tmp_path, "\n".join(lines)))
    assert {(device, severity) for device, severity, _ in found} == {("GPU 0", FAIL), ("GPU 1", FAIL), (None, FAIL)}


def test_links_that_are_lost_are_counted_but_for_the_boot(tmp_path: Path) -> None:
    times = (12, 600, 601, 602, 863000, 863001)
    text = "".join(f"[{at}.5] mlx5_core 0000:18:00.0 ib0: Link {way}\n" for at in times for way in ("down", "up"))
    sick = "[7.1] mlx5_core 0000:18:00.0: poll_health:830: device's health compromised - reached miss\n"  # at any time
    timeless = "mlx5_core 0000:18:00.0 ib0: Cable unplugged\n"
    log = read_kernel_log(with_log(tmp_path, text + sick + timeless).section(KERNEL_LOG.name))
    assert log.seen == (
        (2, "[602.5] mlx5_core 0000:18:00.0 ib0: Link down"),
        (2, "[863001.5] mlx5_core 0000:18:00.0 ib0: Link down"),  # what came within a day is counted apart
        (1, sick.strip()),
        (1, timeless.strip()),
    )
    assert (log.reader, log.total, log.boot) == ("cat", 14, False)


@pytest.mark.parametrize(("text", "severity"), [("[900.0] usb 1-1: new device\n", WARN), ("", UNKNOWN)])
def test_a_log_without_its_beginning_and_a_log_without_lines(tmp_path: Path, text: str, severity: Verdict) -> None:
    assert [found[1] for found in errors(with_log(tmp_path, text))] == [severity]


GRADES = ((1, "Fatal"), (2, "Nonfatal"))
SEEN = "printf 'Linux version 6.1\\nNVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\\n'"


@pytest.mark.parametrize(
    ("journal", "dmesg", "reader"),
    [
        (SEEN, "echo '[9.0] nothing of interest'", "journalctl"),
        # A journal that shows nothing is no clean journal.
        ("exit 0", SEEN, "dmesg"),
        ("echo 'No journal files were opened due to insufficient permissions.'; exit 1", SEEN, "dmesg"),
        ("echo '-- No entries --'", SEEN, "dmesg"),
        ("echo 'Hint: You are currently not seeing messages from other users.'", SEEN, "dmesg"),
        ("exit 1", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1", ""),
        *(("exit 1", f"exit {code}", "") for code in (0, 127)),
    ],
)
def test_the_journal_is_read_before_the_buffer_of_the_kernel(
    tmp_path: Path, journal: str, dmesg: str, reader: str
) -> None:
    write_program(tmp_path / "bin/journalctl", journal)
    write_program(tmp_path / "bin/dmesg", dmesg)
    probe = with_log(tmp_path)
    found = only(check(probe), "gpu.xid")
    if reader:
        assert read_kernel_log(probe.section(KERNEL_LOG.name)).reader == reader
        assert (found.severity, found.observed) == (FAIL, "Xid 79")
    else:
        assert (found.severity, "not permitted" in found.evidence) == (UNKNOWN, "permitted" in dmesg)


def test_gpu_addresses_come_from_sysfs_or_nvidia_smi_while_the_other_is_silent() -> None:
    def addresses(probe: NodeProbe) -> tuple[GpuAddress, ...]:
        return NodeFacts(probe, CONFIG).gpu_addresses

    whole = addresses(healthy())
    audio = ["0000:01:00.1", "0x040300", "", "/sys/devices/pci0000:00/0000:01:00.1"]  # a function of a GPU, and none
    told = healthy().section("gpu.lspci").document()
    beside = changed_section(healthy(), "gpu.lspci", output=json.dumps({**told, "devices": [audio, *told["devices"]]}))
    assert addresses(changed(beside, "gpu.smi!15")) == addresses(beside) == whole
    bare = tuple(replace(gpu, pci_path=gpu.pci_path[-1:], numa_node=None) for gpu in whole)
    assert addresses(changed(healthy(), "gpu.lspci!1")) == bare
