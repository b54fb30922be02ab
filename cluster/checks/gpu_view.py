"""One node as the checks of its GPUs see it: everything read once, and the way from fields of GPUs to findings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cluster.checks.check import Check
from cluster.checks.finding import Finding, Verdict
from cluster.survey.nvidia_smi import (
    LSPCI_SECTION,
    SMI_SECTION,
    Gap,
    GapError,
    Gpu,
    PciDevices,
    SmiFailure,
    SmiLog,
    SmiTrouble,
    read_pci_devices,
    read_smi,
)
from cluster.survey.section import NodeProbe, UnreadableError
from engine.config.cluster import ClusterConfig

AGAIN_SECTION = "gpu.again"
# What a rule says of one GPU, by a check on that device; None where all is well.
GpuJudge = Callable[[Gpu, Check], Finding | None]


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
        """The answer of a node, read."""
        smi, again = (read_smi(probe.section(name)) for name in (SMI_SECTION, AGAIN_SECTION))
        return cls(probe, config, smi, again, read_pci_devices(probe.section(LSPCI_SECTION)))

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
        known = [gpu.address for gpu in self.gpus or (self.pci.gpus if self.pci else ())]
        return f"GPU {known.index(address)}" if address in known else address

    def answer(self) -> SmiLog:
        """The answer of nvidia-smi. Raises UnreadableError."""
        if isinstance(self.smi, SmiLog):
            return self.smi
        cause = "gpu.lost" if self.smi.failure is SmiFailure.GPU_LOST else "gpu.nvidia_smi"
        raise UnreadableError(f"nvidia-smi: {self.smi.failure.value}", remedy=f"see {cause}")

    def unreadable(self, text: str, section: str) -> UnreadableError:
        """The error of a section that cannot be believed."""
        why = self.probe.section(section).trouble() or "the answer is incomplete or of an unknown form"
        return UnreadableError(text, why)

    def each(
        self,
        check: Check,
        what: str,
        judge: GpuJudge,
        fine: str,
        *,
        gpus: Iterable[Gpu] | None = None,
        is_optional: bool = True,
    ) -> list[Finding]:
        """A finding for every GPU that `judge` says something of; one OK with `fine` when it says nothing at all.

        A field that is not there makes a GPU UNKNOWN, or SKIP where the GPU does not have it and `is_optional`; `what`
        names the field. The same SKIP or UNKNOWN of all GPUs becomes one finding of the node.
        """
        listed = self.answer().gpus if gpus is None else tuple(gpus)
        if not listed:
            return [check.unknown("nvidia-smi lists no GPU")]
        told = [_judge(gpu, check.on(gpu.device), what, judge, is_optional) for gpu in listed]
        given = [finding for finding in told if finding is not None]
        if not given:
            return [check.ok(fine)]
        whole = {replace(finding, device=None) for finding in given}
        is_vague = given[0].severity in (Verdict.SKIP, Verdict.UNKNOWN)
        return list(whole) if is_vague and len(whole) == 1 and len(given) == len(listed) else given


def known_numbers(gpus: Iterable[Gpu], *paths: str) -> set[float]:
    """The different numbers of those GPUs that tell one."""
    found = set()
    for gpu in gpus:
        with contextlib.suppress(GapError):
            found.add(gpu.number(*paths))
    return found


def spread(values: Iterable[object]) -> str:
    """The different values in order, for one line: `8` or `8, 16`."""
    return ", ".join(sorted({f"{value:g}" if isinstance(value, float) else str(value) for value in values}))


def _judge(gpu: Gpu, check: Check, what: str, judge: GpuJudge, is_optional: bool) -> Finding | None:
    try:
        return judge(gpu, check)
    except GapError as error:
        if error.gap is Gap.NOT_SUPPORTED and is_optional:
            return check.skip(f"{what}: not supported by this GPU")
        return check.unknown(f"{what}: {error.gap.value}", "compare with `nvidia-smi -q` on the node")
