"""Can these nodes carry a run? They are asked once, and judged by those checks of `burst check-nodes` that matter to a
launch, and by those of its own: every problem at once, said once for all nodes that have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.fold import fold_reports
from cluster.checks.groups.launch import count_gpus, launch_group
from cluster.checks.groups.software import VERSIONS
from cluster.checks.run import CheckOptions, check_nodes
from cluster.checks.selection import EXPLANATIONS, GROUPS, Selection
from cluster.errors import ClusterError
from cluster.ssh.connection import Connect
from cluster.ssh.hosts import Host
from cluster.ssh.nodes import fold_nodes
from cluster.survey.facts import NodeFacts
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig

# No run starts while one of these is not as it should be, whatever --force says.
REQUIRED = frozenset(
    {
        *("ssh.reach", "net.interface", "host.python", "host.docker", "host.image"),
        *(f"launch.{name}" for name in ("adapters", "folder", "data", "ranks", "port")),
    }
)
# Of the others what fails is a risk that --force takes, and what is odd or unseen is said. What only makes a node slow
# or untidy is for `burst check-nodes`.
_ALWAYS = frozenset({"net.interface", "host.python", VERSIONS, "ssh.clock"})
_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class NodeProblem:
    """What keeps nodes from carrying the run. is_risk: --force may take it."""

    nodes: tuple[str, ...]
    text: str
    is_risk: bool = False

    def __str__(self) -> str:
        return f"{fold_nodes(self.nodes)}: {self.text}"


class UnfitNodesError(ClusterError):
    """Nodes that cannot carry the run; `problems` has them all."""

    def __init__(self, problems: Sequence[NodeProblem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in problems]
        if problems and all(problem.is_risk for problem in problems):
            lines.append("To start all the same, add --force.")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Fit:
    """Nodes that can carry the run, in the order of their ranks, and what is odd about them."""

    nodes: tuple[NodeFacts, ...]
    warnings: tuple[str, ...]


def check_launch(
    hosts: Sequence[Host],
    config: RunConfig,
    *,
    health: bool = False,
    force: bool = False,
    connect: Connect | None = None,
) -> Fit:
    """The nodes behind `hosts`, fit for `config`; nothing on them changes. Raises UnfitNodesError.

    health: look at what a run survives at first, too. force: take risks.
    """
    cluster = config.cluster
    options = CheckOptions(
        launch_selection(cluster, health=health, with_gpus=cluster.backend != "gloo"),
        timeout_s=_TIMEOUT_S,
        all_groups=(*GROUPS, launch_group(config)),
        connect=connect,
    )
    report = check_nodes(hosts, cluster, options)
    selection = launch_selection(cluster, health=health, with_gpus=_uses_gpus(cluster, report.facts))
    return Fit(tuple(report.facts.values()), judge_report(report, selection, force=force))


def launch_selection(cluster: ClusterConfig, *, health: bool, with_gpus: bool) -> Selection:
    """What is checked: GPUs and adapters where NCCL uses them; between nodes nothing, for that takes its time."""
    in_containers = cluster.container.runtime == "docker"
    gpus = {name for name in EXPLANATIONS if name.startswith(("gpu.", "ib."))} - {"gpu.dcgm_diag"}  # takes long
    parts = (
        (True, _ALWAYS),
        (in_containers, {"host.docker", "host.image"}),
        (with_gpus, {"gpu.busy"}),
        (health, {"net.mtu", "host.disk", "host.shm"}),
        (health and in_containers, {"host.docker_gpu"}),
        (health and with_gpus, {"host.memlock", "host.nccl_conf", *gpus}),
    )
    wanted = {name for is_wanted, names in parts if is_wanted for name in names}
    return Selection(skip=tuple(name for name in EXPLANATIONS if name not in wanted))


def _uses_gpus(cluster: ClusterConfig, nodes: Mapping[str, NodeFacts]) -> bool:
    """Whether ranks get GPUs, as far as that is known."""
    counts = [count for facts in nodes.values() if (count := count_gpus(facts)) is not None]
    return cluster.backend == "nccl" or (
        cluster.backend == "auto" and min(counts, default=1) >= (cluster.ranks_per_node or 1)
    )


def judge_report(report: FleetReport, selection: Selection, *, force: bool = False) -> tuple[str, ...]:
    """Warnings. Raises UnfitNodesError with every problem of the report, of which `force` makes the risks warnings."""
    problems, warnings = [], [*report.notes]
    for fold in fold_reports(_by_subject(report, selection)):
        for finding in fold.findings:
            is_risk = REQUIRED.isdisjoint(finding.check.split(", "))
            problem = NodeProblem(fold.names, _text(finding), is_risk=is_risk)
            if not is_risk or (_is_problem(finding) and not force):
                problems.append(problem)
            else:
                warnings.append(str(problem))
    if problems:
        raise UnfitNodesError(problems)
    return tuple(warnings)


def _is_problem(finding: Finding) -> bool:
    """Whether it stops a launch. What differs between two nodes is odd on each of them, and stops them together."""
    is_shared = finding.check == VERSIONS or finding.check.startswith("launch.")
    return finding.severity is Verdict.FAIL or (finding.severity is Verdict.WARN and is_shared)


def _by_subject(report: FleetReport, selection: Selection) -> Iterator[NodeReport]:
    """The findings of every node apart by check, or by why several could not be seen."""
    for name, node in report.nodes.items():
        subjects: dict[str, list[Finding]] = {}
        for finding in node.findings:
            if not selection.wants(finding.check):
                continue
            subject = finding.check
            if finding.severity is Verdict.UNKNOWN:
                evidence = f" ({finding.evidence})" if finding.evidence else ""
                finding = replace(finding, observed=(subject := finding.observed + evidence))
            subjects.setdefault(subject, []).append(finding)
        yield from (NodeReport(name, tuple(findings)) for findings in subjects.values())


def _text(finding: Finding) -> str:
    device = f" {finding.device}" if finding.device else ""
    expected = f", expected {finding.expected}" if finding.expected else ""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{finding.check}{device}: {finding.observed}{expected}{remedy}"
