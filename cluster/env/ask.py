"""The one executor of `burst env`: asks nodes, or this machine, and keeps what each answered or why it did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.access.fanout import fan_out
from cluster.access.hosts import Host
from cluster.access.ssh import SshPool
from cluster.env.facts import NodeEnvironment, NodeEnvironmentFacts
from cluster.env.gather import FACT_GROUPS, FACT_SECTIONS, read_facts
from cluster.env.live import LIVE_GROUP, LIVE_SECTIONS, LiveSource, read_live
from cluster.env.plan import plan_fleet
from cluster.probe.run import probe_local, probe_node
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

PROBE_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class FleetEnvironment:
    """What came of every node: its environment (and what is set on it, if asked for), or why there is none."""

    environments: Mapping[str, NodeEnvironment] = field(default_factory=dict)
    live: Mapping[str, tuple[LiveSource, ...]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Answer:
    facts: NodeEnvironmentFacts
    live: tuple[LiveSource, ...]


def ask_fleet(
    hosts: Sequence[Host],
    config: ClusterConfig,
    *,
    with_live: bool = False,
    log_dir: str | None = None,
) -> FleetEnvironment:
    """The environments of `hosts`, asked at the same time, planned together; of this machine when there are none."""
    question = _Question(config, with_live)
    answers: dict[str, _Answer] = {}
    errors: dict[str, str] = {}
    if not hosts:
        answer = question.ask_this_machine()
        answers[answer.facts.node] = answer
    else:
        with SshPool() as pool:  # nodes behind the same jump host share one login there
            outcomes = fan_out(hosts, lambda host: question.ask(host, pool), width=config.ssh.fan_out)
        for name, outcome in outcomes.items():
            if outcome.value is not None:
                answers[name] = outcome.value
            else:
                errors[name] = str(outcome.error)
    planned = plan_fleet((answer.facts for answer in answers.values()), config, log_dir=log_dir)
    return FleetEnvironment(planned, {name: answer.live for name, answer in answers.items()}, errors)


@dataclass(frozen=True)
class _Question:
    """What every node is asked."""

    config: ClusterConfig
    with_live: bool

    @property
    def groups(self) -> tuple[str, ...]:
        return (*FACT_GROUPS, LIVE_GROUP) if self.with_live else FACT_GROUPS

    @property
    def settings(self) -> dict[str, str]:
        """The sections to answer; the others are left out."""
        sections = (*FACT_SECTIONS, *LIVE_SECTIONS) if self.with_live else FACT_SECTIONS
        return {"BURST_PROBE_SECTIONS": " ".join(sections)}

    def ask(self, host: Host, pool: SshPool) -> _Answer:
        with pool.connect(host) as connection:
            probe = probe_node(connection, self.groups, timeout_s=PROBE_TIMEOUT_S, settings=self.settings)
        return self._read(probe, host.reached_by)

    def ask_this_machine(self) -> _Answer:
        return self._read(probe_local(self.groups, timeout_s=PROBE_TIMEOUT_S, settings=self.settings))

    def _read(self, probe: NodeProbe, reached_by: Sequence[str] = ()) -> _Answer:
        return _Answer(read_facts(probe, self.config, reached_by), read_live(probe) if self.with_live else ())
