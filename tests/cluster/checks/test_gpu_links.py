"""PCI devices, NVLinks, the peer-to-peer matrix, the fabric manager and the kernel log become values."""

from __future__ import annotations

import pytest
from gpu_rehearsal import ended, fixture_text, healthy, with_section, with_text

from cluster.parse.gpus import parse_gpu_addresses, read_pci_devices
from cluster.parse.gpus_links import read_fabric_manager, read_nvlinks, read_p2p
from cluster.parse.kernel_log import XID_CLASSES, XidClass, read_kernel_log, recovery_class
from cluster.probe.section import Section
from cluster.testbed.hardware.profiles import MODELS


def test_pci_devices_hold_gpus_and_switches() -> None:
    devices = read_pci_devices(healthy("a100x8").section("gpu.lspci"))
    assert devices is not None
    assert (len(devices.gpus), len(devices.nvswitches), devices.total) == (8, 6, 18)
    assert devices.gpus[0].address == "0000:07:00.0"
    assert devices.gpus[0].width_max == 16


def test_the_audio_function_of_a_gpu_is_no_gpu() -> None:
    line = "pci\t0000:01:00.1\tclass=0x040300\twidth=16\tpath=/sys/devices/pci0000:00/0000:01:00.1"
    devices = read_pci_devices(ended(f"{line}\npci_devices\t5\tend"))
    assert devices is not None
    assert devices.gpus == ()
    assert len(devices.devices) == 1


@pytest.mark.parametrize(
    "text", ["", "pci_devices\t5", "pci_devices\tx\tend", "pci\t0000:01:00.0\tclass=zz\tpath=/\npci_devices\t5\tend"]
)
def test_a_list_of_devices_that_breaks_off_is_none(text: str) -> None:
    assert read_pci_devices(ended(text)) is None


def test_a_device_that_no_longer_answers_has_no_width() -> None:
    line = "pci\t0000:01:00.0\tclass=0x030200\twidth=63\twidth_max=255\tpath=/sys/devices/pci0000:00/0000:01:00.0"
    devices = read_pci_devices(ended(f"{line}\npci_devices\t5\tend"))
    assert devices is not None
    assert (devices.gpus[0].width, devices.gpus[0].width_max) == (None, None)


@pytest.mark.parametrize("profile", ["h100x8", "a100x8"])
def test_gpu_addresses_lead_from_the_root_port_to_the_gpu(profile: str) -> None:
    addresses = parse_gpu_addresses(healthy(profile))
    assert [gpu.index for gpu in addresses] == list(range(8))
    assert [gpu.pci_path for gpu in addresses] == [MODELS[profile].gpu_path(index) for index in range(8)]
    assert [gpu.numa_node for gpu in addresses] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_gpu_addresses_come_from_sysfs_while_nvidia_smi_is_silent() -> None:
    probe = with_section(healthy(), "gpu.smi", exit_code=15)
    assert parse_gpu_addresses(probe) == parse_gpu_addresses(healthy())


def test_gpu_addresses_come_from_nvidia_smi_while_sysfs_is_silent() -> None:
    addresses = parse_gpu_addresses(with_section(healthy(), "gpu.lspci", exit_code=1))
    assert addresses[0].pci_path == ("0000:1b:00.0",)
    assert len(addresses) == 8


def test_links_are_active_inactive_or_all_down() -> None:
    links = read_nvlinks(ended(fixture_text("nvlink_dead.txt")))
    assert links is not None
    assert (links[0].active, links[0].inactive, links[0].all_down) == ((0, 1), (2,), False)
    assert (links[1].links, links[1].all_down) == ({}, True)


def test_no_nvlink_at_all_is_an_empty_answer() -> None:
    assert read_nvlinks(ended("")) == {}


@pytest.mark.parametrize("text", ["GPU 0: A\n\t Link 0: 26.5", "Link 0: 25 GB/s", "GPU 0: A\nsomething else"])
def test_an_answer_about_links_that_is_not_understood_is_none(text: str) -> None:
    assert read_nvlinks(ended(text)) is None


def test_the_peer_matrix_is_read_whole_or_not_at_all() -> None:
    text = fixture_text("p2p_pcie.txt")
    pairs = read_p2p(ended(text))
    assert pairs is not None
    assert len(pairs) == 12
    assert set(pairs.values()) == {"NS"}
    assert read_p2p(ended(text.replace(" GPU3\tNS\tNS\tNS\tX\t\n", ""))) is None
    assert read_p2p(ended(text.replace("GPU1\tNS\tX\tNS\tNS", "GPU1\tNS\tX\tNS"))) is None
    assert read_p2p(ended(text.replace("X\tNS\tNS\tNS", "X\tNS\tWHAT\tNS", 1))) is None


@pytest.mark.parametrize(
    ("text", "unit", "running", "version"),
    [
        ("unit\tactive\nprocess\t12\nscanned\t300\tend", "active", True, None),
        ("unit\tinactive\nscanned\t300\tend", "inactive", False, None),
        ("unit\tFailed to connect to bus: No such file\nprocess\t12\nscanned\t3\tend", None, True, None),
        ("process\t12\nversion\tFabric Manager version is : 550.54.15\nscanned\t3\tend", None, True, "550.54.15"),
    ],
)
def test_fabric_manager(text: str, unit: str | None, running: bool, version: str | None) -> None:
    manager = read_fabric_manager(ended(text))
    assert manager is not None
    assert (manager.unit, manager.is_running, manager.version) == (unit, running, version)


def test_no_process_seen_at_all_says_nothing_about_the_fabric_manager() -> None:
    assert read_fabric_manager(ended("unit\tactive\nscanned\t0\tend")) is None


def kernel(*lines: str) -> Section:
    return ended("\n".join([*(f"seen\t1\t{line}" for line in lines), "log\tdmesg\t900\tsince boot"]))


def test_an_xid_has_device_process_and_class() -> None:
    log = read_kernel_log(kernel("[1.0] NVRM: Xid (PCI:0000:0f:00): 94, pid=2503421, name=python3, Ch 00000008"))
    assert log is not None
    (xid,) = log.xids
    assert (xid.address, xid.code, xid.kind) == ("0000:0f:00.0", 94, XidClass.RESTART_APP)
    assert (xid.pid, xid.process) == (2503421, "python3")


def test_an_unknown_process_is_none() -> None:
    log = read_kernel_log(kernel("NVRM: Xid (PCI:0000:0f:00): 64, pid='<unknown>', name=<unknown>, Row Remapper Error"))
    assert log is not None
    assert (log.xids[0].pid, log.xids[0].process) == (None, None)


EXPECTED_CLASSES = {
    XidClass.RESTART_APP: {13, 31, 32, 43, 45, 63, 92, 94, 121, 137},
    XidClass.RESET: {46, 48, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143},
    XidClass.REBOOT: {79, 151, 168},
}


def test_the_catalogue_of_xids() -> None:
    found = {kind: {code for code, its in XID_CLASSES.items() if its is kind} for kind in EXPECTED_CLASSES}
    assert found == EXPECTED_CLASSES


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", XidClass.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", XidClass.REBOOT),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", XidClass.REBOOT),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", XidClass.RESET),
        ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", None),
        ("words that nobody knows", XidClass.REBOOT),
    ],
)
def test_xid_154_means_what_its_text_says(text: str, kind: XidClass | None) -> None:
    assert recovery_class(text) is kind


def test_a_fallen_gpu_is_told_once() -> None:
    lines = ("NVRM: Xid (PCI:0000:61:00): 79, pid=1, GPU has fallen off the bus.",)
    lines += (
        "NVRM: GPU 0000:61:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 0000:9d:00.0: GPU has fallen off the bus.",
    )
    log = read_kernel_log(kernel(*lines))
    assert log is not None
    assert [(xid.address, xid.code) for xid in log.xids] == [("0000:61:00.0", 79), ("0000:9d:00.0", 79)]


def test_a_switch_error_is_fatal_or_not() -> None:
    log = read_kernel_log(
        kernel(
            "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 32 egress",
            "nvidia-nvswitch3: SXid (PCI:0000:86:00.0): 22013, Fatal, Link 04",
            "nvidia-nvswitch3: SXid (PCI:0000:87:00.0): 10003, Host_req",
        )
    )
    assert log is not None
    assert log.xids == ()
    assert [(xid.code, xid.is_fatal) for xid in log.switch_xids] == [(12028, False), (22013, True), (10003, None)]


def test_a_line_about_an_xid_that_is_not_understood_is_kept() -> None:
    log = read_kernel_log(kernel("NVRM: Xid garbled beyond reading"))
    assert log is not None
    assert len(log.unread) == 1


@pytest.mark.parametrize(
    "text", ["", "dmesg: read kernel buffer failed: Operation not permitted", "log\tdmesg\t0\tcut"]
)
def test_no_log_is_none(text: str) -> None:
    assert read_kernel_log(ended(text)) is None


def test_a_process_cannot_forge_the_end_of_the_kernel_log() -> None:
    log = read_kernel_log(kernel("NVRM: Xid (PCI:0000:0f:00): 79, name=a\tlog\tdmesg"))
    assert log is not None
    assert log.reader == "dmesg"
    assert [xid.code for xid in log.xids] == [79]


def test_a_changed_section_is_told_apart() -> None:
    """A test that damages what is not there would pass without testing anything."""
    with pytest.raises(AssertionError):
        with_text(healthy(), "gpu.smi", "no such words", "")
