"""One node as the checks of its GPUs see it: everything parsed once, and a way to turn opinions into findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.checks.finding import Finding, Verdict
from cluster.parse.gpus import LSPCI_SECTION, SMI_SECTION, PciDevices, read_pci_devices
from cluster.parse.nvidia_smi import Gpu, SmiFailure, SmiLog, SmiTrouble, read_smi
from cluster.parse.nvidia_smi_xml import Gap
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

AGAIN_SECTION = "gpu.again"


@dataclass(frozen=True)
class Opinion:
    """What a rule thinks of one GPU, or of the node; see the fields of the same name of `Finding`."""

    severity: Verdict
    observed: str
    expected: str = ""
    remedy: str = ""
    evidence: str = ""


Judge = Callable[[Gpu], Opinion | None]


@dataclass(frozen=True)
class GpuView:
    """smi, again: the answers of nvidia-smi, seconds apart. pci: what sysfs lists, None if unreadable."""

    probe: NodeProbe
    config: ClusterConfig
    smi: SmiLog | SmiTrouble
    again: SmiLog | SmiTrouble
    pci: PciDevices | None

    @classmethod
    def of(cls, probe: NodeProbe, config: ClusterConfig) -> GpuView:
        """The parsed answer of a node."""
        return cls(
            probe,
            config,
            read_smi(probe.section(SMI_SECTION)),
            read_smi(probe.section(AGAIN_SECTION)),
            read_pci_devices(probe.section(LSPCI_SECTION)),
        )

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
            return not self.smi.gpus and self.smi.attached == 0
        # Without a PCI bus to look at, a tool that is installed and fails may be hiding GPUs. A driver that runs and
        # finds no device (NO_DEVICES) has lost those it was loaded for.
        absent = {SmiFailure.NOT_INSTALLED, SmiFailure.NO_DRIVER}
        return self.smi.failure in (absent if self.pci.total else {SmiFailure.NOT_INSTALLED})

    def device(self, address: str) -> str:
        """`GPU 3` for a PCI address that nvidia-smi or sysfs lists, else the address."""
        known = (
            [gpu.address for gpu in self.gpus] or [gpu.address for gpu in self.pci.gpus if self.pci] if self.pci else []
        )
        known = known or [gpu.address for gpu in self.gpus]
        return f"GPU {known.index(address)}" if address in known else address

    def node(self, check: str, opinion: Opinion, device: str | None = None) -> Finding:
        """`opinion` as a finding about the node, or about `device`."""
        return Finding(
            check,
            self.probe.node,
            opinion.severity,
            opinion.observed,
            opinion.expected,
            opinion.remedy,
            device,
            opinion.evidence,
        )

    def unanswered(self, check: str) -> list[Finding]:
        """UNKNOWN for a check that rests on nvidia-smi, which did not answer; empty when it did."""
        if isinstance(self.smi, SmiTrouble):
            words = f"nvidia-smi: {self.smi.failure.value}"
            cause = "gpu.lost" if self.smi.failure is SmiFailure.GPU_LOST else "gpu.nvidia_smi"
            return [self.node(check, unknown(words, remedy=f"see {cause}"))]
        return []

    def each(self, check: str, judge: Judge, fine: str, gpus: Iterable[Gpu] | None = None) -> list[Finding]:
        """A finding for every GPU that `judge` has an opinion about; one OK with `fine` when it has none at all.

        The same SKIP or UNKNOWN of all GPUs becomes one finding of the node.
        """
        listed = self.gpus if gpus is None else tuple(gpus)
        silent = self.unanswered(check)
        if silent:
            return silent
        if not listed:
            return [self.node(check, unknown("nvidia-smi lists no GPU"))]
        opinions = [(gpu, judge(gpu)) for gpu in listed]
        given = [(gpu, opinion) for gpu, opinion in opinions if opinion is not None]
        if not given:
            return [self.node(check, Opinion(Verdict.OK, fine))]
        first = given[0][1]
        vague = first.severity in (Verdict.SKIP, Verdict.UNKNOWN)
        if vague and len(given) == len(listed) and all(opinion == first for _, opinion in given):
            return [self.node(check, first)]
        return [self.node(check, opinion, gpu.device) for gpu, opinion in given]


def unknown(observed: str, *, evidence: str = "", remedy: str = "") -> Opinion:
    """What could not be seen."""
    return Opinion(Verdict.UNKNOWN, observed, remedy=remedy, evidence=evidence)


def gap_opinion(value: object, what: str) -> Opinion | None:
    """SKIP for a field that this GPU does not have, UNKNOWN for one that is not told, None for a value."""
    if not isinstance(value, Gap):
        return None
    if value is Gap.NOT_SUPPORTED:
        return Opinion(Verdict.SKIP, f"{what}: not supported by this GPU")
    return unknown(f"{what}: {value.value}", remedy="compare with `nvidia-smi -q` on the node")


def spread(values: Iterable[object]) -> str:
    """The different values in order, for one line: `8` or `8, 16`."""
    return ", ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in values}))
