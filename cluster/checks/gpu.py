"""The group `gpu`: everything that `nvidia-smi`, sysfs and the kernel log tell about the GPUs of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cluster.checks import gpu_identity, gpu_kernel, gpu_links, gpu_memory, gpu_smoke, gpu_speed
from cluster.checks.finding import CheckGroup, Finding, Verdict
from cluster.checks.gpu_view import GpuView, Opinion, spread
from cluster.parse.nvidia_smi import Gpu, SmiLog
from cluster.parse.nvidia_smi_xml import Gap, Number
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

# In the order of a person's questions: does it answer, is all there, is it healthy, is it fast, is it free?
CHECKS: tuple[Callable[[GpuView], list[Finding]], ...] = (
    gpu_identity.check_nvidia_smi,
    gpu_identity.check_lost,
    gpu_identity.check_count,
    gpu_identity.check_model,
    gpu_identity.check_driver,
    gpu_kernel.check_xid,
    gpu_kernel.check_sxid,
    gpu_memory.check_recovery,
    gpu_memory.check_ecc_mode,
    gpu_memory.check_ecc,
    gpu_memory.check_sram,
    gpu_memory.check_row_remap,
    gpu_links.check_pcie,
    gpu_links.check_nvlink,
    gpu_links.check_p2p,
    gpu_links.check_fabric_manager,
    gpu_speed.check_throttle,
    gpu_speed.check_power_limit,
    gpu_speed.check_clocks,
    gpu_identity.check_mig,
    gpu_memory.check_busy,
    gpu_smoke.check_cuda_smoke,
)


class _GpuGroup:
    """See `CheckGroup`."""

    name = "gpu"

    def check(self, probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
        """Findings of every check; one SKIP for a node that has no GPU and needs none."""
        view = GpuView.of(probe, config)
        if view.has_no_gpus:
            # The kernel log may remember those that fell off the bus.
            lost = [finding for finding in gpu_kernel.check_xid(view) if finding.severity is Verdict.FAIL]
            return [view.node("gpu.count", Opinion(Verdict.SKIP, "no NVIDIA GPU in this node")), *lost]
        return [finding for check in CHECKS for finding in check(view)]

    def traits(self, probe: NodeProbe) -> Mapping[str, str]:
        """What all nodes must have in common. A node without GPUs has the count 0: among others it stands out."""
        view = GpuView.of(probe, ClusterConfig())
        if view.has_no_gpus:
            return {"gpu.count": "0"}
        if not isinstance(view.smi, SmiLog) or not view.gpus:
            return {}
        values = {name: _common(map(value, view.gpus)) for name, value in _TRAITS.items()}
        values |= {"gpu.count": str(len(view.gpus)), "gpu.nvlink": gpu_links.nvlink_trait(view)}
        values["gpu.driver"] = _common([view.smi.driver])
        return {name: value for name, value in sorted(values.items()) if value is not None}


def _common(values: Iterable[object]) -> str | None:
    """The values of all GPUs in one word; None as soon as one is not known."""
    listed = list(values)
    return None if any(isinstance(value, Gap) for value in listed) else spread(listed)


def _with_unit(value: Number, unit: str) -> object:
    return value if isinstance(value, Gap) else f"{value:g} {unit}"


def _clocks(gpu: Gpu) -> object:
    clocks = gpu.clocks
    for value in (clocks.sm_max, clocks.memory_max):
        if isinstance(value, Gap):
            return value
    return f"{clocks.sm_max:g}/{clocks.memory_max:g} MHz"


_TRAITS: Mapping[str, Callable[[Gpu], object]] = {
    "gpu.model": lambda gpu: gpu.model,
    "gpu.ecc_mode": lambda gpu: gpu.ecc.mode,
    "gpu.mig": lambda gpu: gpu.mig,
    "gpu.power_limit": lambda gpu: _with_unit(gpu.power_limit_w, "W"),
    "gpu.clocks": _clocks,
}

GROUP: CheckGroup = _GpuGroup()
