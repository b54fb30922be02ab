"""PCI devices, NVLinks, the peer-to-peer matrix, the fabric manager and the kernel log become values."""

from __future__ import annotations

import pytest
from gpu_rehearsal import ended, fixture_text, healthy, with_section

from cluster.checks.gpu_kernel import KernelLog, XidClass, read_kernel_log, recovery_class
from cluster.checks.gpu_links import read_nvlinks, read_p2p
from cluster.parse.gpus import parse_gpu_addresses, read_pci_devices
from cluster.testbed.hardware.gpus import gpu_pci_path


def test_pci_devices_hold_gpus_and_switches() -> None:
    devices = read_pci_devices(healthy("a100x8").section("gpu.lspci"))
    assert devices is not None
    assert (len(devices.gpus), len(devices.nvswitches), devices.total) == (8, 6, 14)
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
    assert [gpu.pci_path for gpu in addresses] == [gpu_pci_path(profile, index) for index in range(8)]
    assert [gpu.numa_node for gpu in addresses] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_gpu_addresses_come_from_sysfs_while_nvidia_smi_is_silent() -> None:
    probe = with_section(healthy(), "gpu.smi", exit_code=15)
    assert parse_gpu_addresses(probe) == parse_gpu_addresses(healthy())


def test_gpu_addresses_come_from_nvidia_smi_while_sysfs_is_silent() -> None:
    addresses = parse_gpu_addresses(with_section(healthy(), "gpu.lspci", exit_code=1))
    assert addresses[0].pci_path == ("0000:1b:00.0",)
    assert len(addresses) == 8


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("", {}),
        (
            "GPU 0: A\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: B\n"
            "NVML: Unable to retrieve NVLink information as all links are inActive",
            {0: {0: 26.562, 1: None}, 1: None},
        ),
        ("GPU 0: A\n\t Link 0: 26.5", None),
        ("Link 0: 25 GB/s", None),
        ("GPU 0: A\nsomething else", None),
    ],
)
def test_links_are_read_whole_or_not_at_all(text: str, links: object) -> None:
    assert read_nvlinks(ended(text)) == links


def test_the_peer_matrix_is_read_whole_or_not_at_all() -> None:
    text = fixture_text("p2p_pcie.txt")
    pairs = read_p2p(ended(text))
    assert pairs is not None
    assert len(pairs) == 12
    assert set(pairs.values()) == {"NS"}
    assert read_p2p(ended(text.replace(" GPU3\tNS\tNS\tNS\tX\t\n", ""))) is None
    assert read_p2p(ended(text.replace("GPU1\tNS\tX\tNS\tNS", "GPU1\tNS\tX\tNS"))) is None
    assert read_p2p(ended(text.replace("X\tNS\tNS\tNS", "X\tNS\tWHAT\tNS", 1))) is None


def log_of(*lines: str) -> KernelLog:
    text = "\n".join([*(f"seen\t1\t{line}" for line in lines), "log\tdmesg\t900\tsince boot"])
    return read_kernel_log(ended(text))


@pytest.mark.parametrize(
    ("rest", "code", "process"),
    [
        ("94, pid=2503421, name=python3, Ch 00000008", 94, "python3, pid 2503421"),
        ("64, pid='<unknown>', name=<unknown>, Row Remapper Error", 64, ""),
    ],
)
def test_an_xid_has_device_code_and_process(rest: str, code: int, process: str) -> None:
    (xid,) = log_of(f"[1.0] NVRM: Xid (PCI:0000:0f:00): {rest}").xids
    assert (xid.address, xid.code, xid.process) == ("0000:0f:00.0", code, process)


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
    log = log_of(
        "NVRM: Xid (PCI:0000:61:00): 79, pid=1, GPU has fallen off the bus.",
        "NVRM: GPU 0000:61:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 0000:9d:00.0: GPU has fallen off the bus.",
    )
    assert [(xid.address, xid.code) for xid in log.xids] == [("0000:61:00.0", 79), ("0000:9d:00.0", 79)]


def test_a_process_cannot_forge_the_end_of_the_kernel_log() -> None:
    log = log_of("NVRM: Xid (PCI:0000:0f:00): 79, name=a\tlog\tdmesg")
    assert (log.reader, [xid.code for xid in log.xids]) == ("dmesg", [79])
