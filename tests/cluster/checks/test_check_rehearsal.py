"""The real probe script in a real shell on the nodes of a testbed's hardware, healthy and with faults."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from rehearsal import GPU, IB, ask, check, healthy, rehearse, write_files
from testkit.check_fakes import bad, only, told

from cluster.checks.finding import Verdict
from cluster.checks.groups.ib import FabricView
from cluster.survey.adapters import HcaPort, parse_adapters
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, SectionState
from cluster.testbed.hardware.devices import compute_adapters, gpu_path, hardware_table
from engine.config.cluster import ClusterConfig

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
SILENT = {"smi_truncated": "no whole answer", "smi_missing": "not installed", "smi_hangs": "no answer"}


@pytest.mark.parametrize("node", NODES, ids=" ".join)
def test_faults_are_found_and_nothing_else(tmp_path: Path, node: tuple[str, ...]) -> None:
    findings = check(rehearse(tmp_path, *node), GPU, IB)
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
    findings = check(probe, GPU, IB, gpus=8, gpu_model=profile[:4].upper(), hcas=len(wanted))
    assert {found.check for found in findings if found.severity is not OK} == {"ib.gid", "ib.mtu"}
    assert not bad(findings)
    assert all(section.ok for section in probe.sections.values())
    view = FabricView.of(NodeFacts(probe, ClusterConfig()))
    assert {port.device for port in view.ports} == set(wanted)
    gpus = view.facts.gpu_addresses
    told = [(gpu.index, gpu.pci_path, gpu.numa_node) for gpu in gpus]
    assert told == [(k, gpu_path(profile, k), k // 4) for k in range(8)]
    # Every GPU shares a switch with the adapter of its rail.
    ports = {port.device: port for port in view.ports}
    assert [gpu.pci_path[:2] for gpu in gpus[:: 8 // len(wanted)]] == [ports[name].pci_path[:2] for name in wanted]


def test_a_lost_gpu_is_named_and_nothing_is_believed_of_the_others(tmp_path: Path) -> None:
    findings = check(rehearse(tmp_path, "h100x8", "gpu_lost:3"))
    failed = {(found.check, found.device) for found in findings if found.severity is FAIL}
    assert failed == {(f"gpu.{name}", "GPU 3") for name in ("nvidia_smi", "xid", "dcgm_diag")}
    assert {found.check for found in findings if found.severity is OK} == set()


@pytest.mark.parametrize("fault", SILENT)
def test_a_nvidia_smi_that_does_not_answer_fails_and_leaves_all_else_unknown(tmp_path: Path, fault: str) -> None:
    probe = rehearse(tmp_path, "h100x8", fault, limit_s=1 if fault == "smi_hangs" else 30)
    findings = check(probe)
    seen = {"gpu.xid", *(("gpu.dcgm_health", "gpu.dcgm_diag") if fault != "smi_hangs" else ())}
    told = dict.fromkeys(GPU.checks, UNKNOWN) | dict.fromkeys(seen, OK)
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


# Shells.


def parse_ports(probe: NodeProbe) -> tuple[HcaPort, ...]:
    return parse_adapters(probe.section("ib.ports")).ports


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


def test_an_adapter_without_ports_is_told(tree: Path) -> None:
    shutil.rmtree((tree / "sys/class/infiniband/mlx5_2/ports").resolve())
    assert ("ib.count", "mlx5_2", FAIL) in bad(check(ask(tree.parent), IB))
