"""What makes a healthy GPU slow: throttling, power limits, clocks, heat."""

from __future__ import annotations

from cluster.checks.finding import Finding, Verdict
from cluster.checks.gpu_view import GpuView, Opinion, gap_opinion, spread
from cluster.parse.nvidia_smi import THROTTLE_BITS, Gpu
from cluster.parse.nvidia_smi_xml import Gap

THROTTLE_FAIL_MASK = 0x8 | 0x40 | 0x80  # hardware: slowdown, thermal, power brake
THROTTLE_FINE_MASK = 0x1 | 0x2 | 0x4  # idle, clocks as set, at the power limit: normal in work
# Every other bit warns: 0x20, with which the driver lowers clocks because of heat, and what is not known yet.


def check_throttle(view: GpuView) -> list[Finding]:
    """gpu.throttle: nothing holds the clocks down."""

    def judge(gpu: Gpu) -> Opinion | None:
        if isinstance(gpu.throttle, Gap):
            return gap_opinion(gpu.throttle, "throttle reasons")
        mask = gpu.throttle & ~THROTTLE_FINE_MASK
        if not mask:
            return None
        names = [name.replace("_", " ") for name, bit in THROTTLE_BITS.items() if mask & bit]
        severity = Verdict.FAIL if mask & THROTTLE_FAIL_MASK else Verdict.WARN
        remedy = "check fans, air flow and power supplies of the node (BMC: sensors, event log)"
        return Opinion(severity, f"slowed down: {', '.join(names)} (0x{mask:x})", "full clocks", remedy)

    return view.each("gpu.throttle", judge, "nothing slows a GPU down")


def check_power_limit(view: GpuView) -> list[Finding]:
    """gpu.power_limit: nobody lowered the limit, and all GPUs have the same."""
    limits = {gpu.power_limit_w for gpu in view.gpus if not isinstance(gpu.power_limit_w, Gap)}

    def judge(gpu: Gpu) -> Opinion | None:
        limit, default = gpu.power_limit_w, gpu.power_default_w
        if isinstance(limit, Gap) or isinstance(default, Gap):
            return gap_opinion(limit if isinstance(limit, Gap) else default, "power limit")
        remedy = f"`nvidia-smi -pl {default:g}`; ranks of one job wait for the slowest GPU"
        if limit < default:
            return Opinion(Verdict.WARN, f"limited to {limit:g} W", f"{default:g} W, the default", remedy)
        if limit < max(limits):
            return Opinion(Verdict.WARN, f"limited to {limit:g} W", f"{max(limits):g} W, as other GPUs here", remedy)
        return None

    return view.each("gpu.power_limit", judge, f"power limit {spread(limits)} W")


def check_clocks(view: GpuView) -> list[Finding]:
    """gpu.clocks: nobody locked clocks below the default, and all GPUs can reach the same."""
    highest = {gpu.clocks.sm_max for gpu in view.gpus if not isinstance(gpu.clocks.sm_max, Gap)}

    def judge(gpu: Gpu) -> Opinion | None:
        clocks = gpu.clocks
        if isinstance(clocks.sm_max, Gap):
            return gap_opinion(clocks.sm_max, "highest clock")
        remedy = "`nvidia-smi -rac` and `nvidia-smi -rgc` take settings of clocks back"
        if clocks.sm_max < max(highest):
            expected = f"{max(highest):g} MHz, as other GPUs here"
            return Opinion(Verdict.WARN, f"at most {clocks.sm_max:g} MHz", expected, remedy)
        set_to, default = clocks.application, clocks.application_default
        # Newer drivers have no application clocks any more; a value that cannot be read is another matter.
        if Gap.UNREADABLE in (set_to, default):
            return gap_opinion(Gap.UNREADABLE, "application clocks")
        if not isinstance(set_to, Gap) and not isinstance(default, Gap) and set_to < default:
            return Opinion(Verdict.WARN, f"clocks set to {set_to:g} MHz", f"{default:g} MHz, the default", remedy)
        return None

    return view.each("gpu.clocks", judge, f"up to {spread(highest)} MHz")
