"""GPUs and NVSwitches as sysfs shows them: where they sit, whatever the driver says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.parse.fabric import GpuAddress
from cluster.parse.nvidia_smi import SmiLog, normal_address, read_smi
from cluster.probe.section import NodeProbe, Section

LSPCI_SECTION = "gpu.lspci"
SMI_SECTION = "gpu.smi"
_PATH_STEP = re.compile(r"(?<=/)[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)")


@dataclass(frozen=True)
class NvidiaDevice:
    """One PCI device of NVIDIA. pci_path: as in `cluster.parse.fabric.HcaPort`."""

    address: str
    pci_class: int
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether it is a 3D or display controller; a GPU's audio and USB functions are devices of their own."""
        return self.pci_class >> 8 in (0x0300, 0x0302)

    @property
    def is_nvswitch(self) -> bool:
        """Whether it is a bridge of class "other": NVSwitches are."""
        return self.pci_class >> 8 == 0x0680


@dataclass(frozen=True)
class PciDevices:
    """What sysfs lists. total: PCI devices of all vendors; 0 means that there is no PCI bus to look at."""

    total: int
    devices: tuple[NvidiaDevice, ...]

    @property
    def gpus(self) -> tuple[NvidiaDevice, ...]:
        """GPUs in the order of nvidia-smi, which is that of their addresses."""
        return tuple(device for device in self.devices if device.is_gpu)

    @property
    def nvswitches(self) -> tuple[NvidiaDevice, ...]:
        """The NVSwitches that this machine can see; a virtual machine may have none and still use them."""
        return tuple(device for device in self.devices if device.is_nvswitch)


def read_pci_devices(section: Section) -> PciDevices | None:
    """The devices in `section`; None when it did not end properly or breaks off."""
    if not section.ok:
        return None
    total: int | None = None
    devices = []
    for line in section.output.splitlines():
        kind, *words = line.split("\t")
        if kind == "pci" and words:
            device = _device(words[0], dict(word.partition("=")[::2] for word in words[1:]))
            if device is None:
                return None
            devices.append(device)
        elif kind == "pci_devices" and words[1:] == ["end"] and words[0].isdigit():
            total = int(words[0])
    if total is None or total < len(devices):
        return None
    return PciDevices(total, tuple(sorted(devices, key=lambda device: device.address)))


def parse_gpu_addresses(probe: NodeProbe) -> tuple[GpuAddress, ...]:
    """Where the GPUs sit, by index. The order is that of nvidia-smi, or of the addresses while it does not answer."""
    devices = read_pci_devices(probe.section(LSPCI_SECTION))
    places = {device.address: device for device in devices.gpus} if devices is not None else {}
    log = read_smi(probe.section(SMI_SECTION))
    addresses = [gpu.address for gpu in log.gpus] if isinstance(log, SmiLog) and log.gpus else list(places)
    found = []
    for index, address in enumerate(addresses):
        place = places.get(address)
        if place is None:
            found.append(GpuAddress(index, (address,)))
        else:
            found.append(GpuAddress(index, place.pci_path or (address,), place.numa_node))
    return tuple(found)


def _device(address: str, values: Mapping[str, str]) -> NvidiaDevice | None:
    name = normal_address(address)
    if name is None or not re.fullmatch(r"0x[0-9a-f]{6}", values.get("class", "")) or "path" not in values:
        return None
    numa = values.get("numa", "")
    return NvidiaDevice(
        address=name,
        pci_class=int(values["class"], 16),
        numa_node=int(numa) if numa.isdigit() and len(numa) < 6 else None,
        pci_path=tuple(_PATH_STEP.findall(values["path"])),
    )
