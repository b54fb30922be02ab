"""What is on one node, as checks and environment see it: its answer, read when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from cluster.survey.network import (
    CARRIERS,
    GPUDIRECT,
    LINKS,
    PORTS,
    Adapters,
    Carriers,
    GpuDirect,
    InterfaceChoice,
    Network,
    explain_interface,
    parse_adapters,
    parse_gpudirect,
    read_carriers,
    read_network,
)
from cluster.survey.nvidia_smi import (
    LSPCI,
    SMI,
    Gpu,
    GpuAddress,
    PciDevices,
    SmiFailure,
    SmiLog,
    SmiTrouble,
    read_pci_devices,
    read_smi,
)
from cluster.survey.section import NodeProbe, Question, Section, UnreadableError
from engine.config.cluster import ClusterConfig


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node; what cannot be read raises UnreadableError where it is asked for."""

    probe: NodeProbe
    config: ClusterConfig

    @property
    def node(self) -> str:
        """Its name."""
        return self.probe.node

    @property
    def in_containers(self) -> bool:
        """Whether ranks run in containers."""
        return self.config.container.runtime == "docker"

    def section(self, question: Question) -> Section:
        """What came of one question."""
        return self.probe.section(question.name)

    @cached_property
    def adapters(self) -> Adapters:
        """InfiniBand and RoCE."""
        return parse_adapters(self.section(PORTS))

    @cached_property
    def gpudirect(self) -> GpuDirect:
        """Whether adapters reach GPU memory."""
        return parse_gpudirect(self.section(GPUDIRECT))

    @property
    def reaches_gpus(self) -> bool | None:
        """Whether adapters can read GPU memory themselves; None: not known."""
        try:
            return self.gpudirect.works
        except UnreadableError:
            return None

    @cached_property
    def carriers(self) -> Carriers:
        """Which interfaces lead to storage, and its cores."""
        return read_carriers(self.section(CARRIERS))

    @cached_property
    def network(self) -> Network:
        """Every network interface."""
        return read_network(self.section(LINKS))

    @cached_property
    def interface(self) -> InterfaceChoice:
        """The interface that nodes talk over."""
        return explain_interface(self.network.interfaces, self.config.interface)

    @cached_property
    def smi(self) -> SmiLog | SmiTrouble:
        """What nvidia-smi says, or why it says nothing."""
        return read_smi(self.section(SMI))

    @cached_property
    def smi_log(self) -> SmiLog:
        """What nvidia-smi says."""
        if isinstance(self.smi, SmiLog):
            return self.smi
        raise UnreadableError(f"nvidia-smi: {self.smi.failure.value}", remedy="see gpu.nvidia_smi")

    @cached_property
    def pci(self) -> PciDevices | None:
        """The devices of NVIDIA that sysfs lists; None if unreadable."""
        return read_pci_devices(self.section(LSPCI))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that nvidia-smi lists; none while it does not answer."""
        return self.smi.gpus if isinstance(self.smi, SmiLog) else ()

    @property
    def has_no_gpus(self) -> bool:
        """Whether it has none, and none is expected: sysfs was read and lists none, no tool claims one."""
        if self.pci is None or self.pci.gpus or self.config.expected.gpus:
            return False
        if isinstance(self.smi, SmiLog):
            return not self.smi.gpus and self.smi.look("attached_gpus") == "0"
        # Without a PCI bus to look at, a tool that is installed and fails may be hiding GPUs. A driver that runs and
        # finds no device (NO_DEVICES) has lost those it was loaded for.
        absent = {SmiFailure.NOT_INSTALLED, SmiFailure.NO_DRIVER}
        return self.smi.failure in (absent if self.pci.total else {SmiFailure.NOT_INSTALLED})

    def device(self, address: str) -> str:
        """`GPU 3` for a PCI address that nvidia-smi or sysfs lists, else the address."""
        index = next((gpu.index for gpu in self.gpu_addresses if gpu.pci_path[-1] == address), None)
        return address if index is None else f"GPU {index}"

    @cached_property
    def gpu_addresses(self) -> tuple[GpuAddress, ...]:
        """Where the GPUs sit, by index: in the order of nvidia-smi, or of the PCI bus while it does not answer."""
        places = {gpu.pci_path[-1]: gpu for gpu in self.pci.gpus} if self.pci is not None else {}
        told = [replace(places.get(gpu.address, GpuAddress(0, (gpu.address,))), index=gpu.index) for gpu in self.gpus]
        return tuple(told or places.values())
