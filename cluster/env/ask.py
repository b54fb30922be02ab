"""The one executor of `burst env`: asks nodes, or this machine, and keeps what each answered or why it did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.env.live import LIVE, LiveSource, reaching_ranks, read_live
from cluster.env.plan import FACT_QUESTIONS, NodeEnvironment, check_network, plan_fleet
from cluster.ssh.hosts import Host, fan_out
from cluster.ssh.session import SshPool
from cluster.survey.facts import NodeFacts, survey_here, survey_node
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig

PROBE_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class FleetEnvironment:
    """What came of every node: its environment (and what is set on it, if asked for), or why there is none."""

    environments: Mapping[str, NodeEnvironment] = field(default_factory=dict)
    live: Mapping[str, tuple[LiveSource, ...]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


def ask_fleet(
    hosts: Sequence[Host], config: ClusterConfig, *, with_live: bool = False, log_dir: str | None = None
) -> FleetEnvironment:
    """The environments of `hosts`, asked at the same time, planned together; of this machine when there are none."""
    questions = (*FACT_QUESTIONS, LIVE) if with_live else FACT_QUESTIONS

    def read(probe: NodeProbe, host: Host | None = None) -> tuple[NodeFacts, tuple[LiveSource, ...]]:
        facts = NodeFacts(probe, config)
        check_network(facts, host.overrides if host is not None else ())
        return facts, reaching_ranks(read_live(probe), config.container) if with_live else ()

    def ask(host: Host) -> tuple[NodeFacts, tuple[LiveSource, ...]]:
        with pool.connect(host) as connection:
            return read(survey_node(connection, questions, timeout_s=PROBE_TIMEOUT_S), host)

    errors: dict[str, str] = {}
    if hosts:
        with SshPool() as pool:  # nodes behind the same jump host share one login there
            outcomes = fan_out(hosts, ask)
        answers = [outcome.value for outcome in outcomes.values() if outcome.value is not None]
        errors = {name: str(outcome.error) for name, outcome in outcomes.items() if outcome.error is not None}
    else:
        answers = [read(survey_here(questions, timeout_s=PROBE_TIMEOUT_S))]
    planned = plan_fleet((facts for facts, _ in answers), config, log_dir=log_dir)
    return FleetEnvironment(planned, {facts.node: live for facts, live in answers}, errors)
