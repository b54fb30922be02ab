"""The health of nodes before a launch: those checks of `burst check-nodes` that matter for this run."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.checks.finding import Finding, FleetReport, Verdict
from cluster.checks.fold import fold_reports
from cluster.checks.run import CheckOptions, check_nodes
from cluster.checks.selection import EXPLANATIONS, Selection
from cluster.preflight.judge import NodeProblem, UnfitNodesError
from cluster.ssh.hosts import Host
from engine.config.cluster import ClusterConfig

# What stops a run or spoils it. Whose the processes on a node are, its image, its Python and its clock are asked by the
# survey; what only makes a node slow or untidy is for `burst check-nodes`.
_HOST = frozenset({"host.inodes", "host.shm", "host.docker_gpu"})
_NET = frozenset({"net.subnet", "net.mtu"})
_GPU_LEFT_OUT = frozenset({"gpu.busy", "gpu.cuda_smoke", "gpu.dcgm_diag"})
_WITH_NCCL = frozenset({"host.memlock", "host.nccl_conf"})
_TIMEOUT_S = 60.0


def gate_selection(cluster: ClusterConfig) -> Selection:
    """What is checked: adapters and GPUs where NCCL uses them; between nodes nothing, for that takes its time."""
    nccl = cluster.backend == "nccl"
    groups = ("gpu", "ib", "net", "host") if nccl else ("net", "host")
    wanted = _HOST | _NET | (_WITH_NCCL if nccl else frozenset())
    left_out = (name for name in EXPLANATIONS if name.startswith(("net.", "host.")) and name not in wanted)
    return Selection(only=groups, skip=(*left_out, *_GPU_LEFT_OUT, "ssh.clock"))


def check_health(hosts: Sequence[Host], cluster: ClusterConfig, *, force: bool = False) -> tuple[str, ...]:
    """Warnings. Raises UnfitNodesError with what fails, which `force` makes warnings."""
    report = check_nodes(hosts, cluster, CheckOptions(gate_selection(cluster), timeout_s=_TIMEOUT_S))
    return judge_health(report, force=force)


def judge_health(report: FleetReport, *, force: bool = False) -> tuple[str, ...]:
    """The warnings of a report; what is UNKNOWN warns, too. Raises UnfitNodesError with what fails, unless `force`."""
    failures: list[NodeProblem] = []
    warnings: list[str] = []
    for fold in fold_reports(report.nodes.values()):
        for finding in fold.findings:
            if finding.severity is Verdict.FAIL:
                failures.append(NodeProblem(fold.names, _text(finding), is_risk=True))
            elif finding.severity in (Verdict.WARN, Verdict.UNKNOWN):
                warnings.append(f"{fold.nodes}: {_text(finding)}")
    if failures and not force:
        raise UnfitNodesError(failures)
    return (*map(str, failures), *warnings)


def _text(finding: Finding) -> str:
    device = f" {finding.device}" if finding.device else ""
    expected = f", expected {finding.expected}" if finding.expected else ""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{finding.check}{device}: {finding.observed}{expected}{remedy}"
