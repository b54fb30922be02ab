"""`Runner` for this machine: its processes, and its folders, so that there is nothing to bring anywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.agent.serve import Agent
from cluster.control.link import AskedLink, NodeLink, NodeStatus
from cluster.control.ssh_link import LinkTiming
from cluster.facts import MachineFacts, probe_local_node
from cluster.launch.runner import Asked, NamedNodes, PlainSurvey
from cluster.plan import LaunchPlan, build_launch_plan
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder


class LocalLink(AskedLink):
    """One node of the run in folder `run`, on this machine. A run folder that cannot be written is a `problem`."""

    def __init__(self, run: Path, node: str) -> None:
        super().__init__(str(run), node, start_s=60.0)
        self._agent = Agent()

    def follow(self) -> None:
        """Nothing: the files are here."""

    def poll(self) -> NodeStatus:
        """What the files say now."""
        with self._changed:
            question = self._question(wait_s=0.0)
        self._take(question, self._agent.answer(question)[0])
        return replace(super().poll(), is_synced=self._status.outcome is not None)

    def _request(self, name: str, wish: Any) -> None:
        super()._request(name, wish)
        self.poll()

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class LocalSurvey(PlainSurvey):
    """This machine."""

    config: RunConfig
    facts: MachineFacts
    module: str

    def plan(self, config: RunConfig, run_path: Path) -> LaunchPlan:
        return build_launch_plan(config, self.facts, run_path, module=self.module)


class LocalRunner(NamedNodes):
    """Ranks of this machine."""

    is_here = True

    def survey(self, config: RunConfig, asked: Asked) -> LocalSurvey:
        cluster = config.cluster
        if (cluster.num_nodes or 1) > 1:
            raise ConfigError(
                f"cluster.num_nodes={cluster.num_nodes}, but no nodes are named: give --hosts node[1-4], --hostfile "
                "FILE or cluster=NAME (a file in conf/cluster/ with `nodes:`), or cluster.launcher=slurm"
            )
        if cluster.container.runtime != "bare":
            raise ConfigError(
                f"cluster.container.runtime={cluster.container.runtime}: on this machine itself, ranks start outside "
                "of containers only. Add cluster.container.runtime=bare, run `burst launch` inside the image, or name "
                "this machine with --hosts, so that it is reached by SSH"
            )
        return LocalSurvey(config, local_facts(config), asked.module)

    def links(self, plan: LaunchPlan, run: RunFolder, timing: LinkTiming | None) -> list[NodeLink]:
        return [LocalLink(run.path, node.name) for node in plan.nodes]


def local_facts(config: RunConfig) -> MachineFacts:
    """This machine, with the Python that the ranks are to have."""
    facts, python = probe_local_node(), config.cluster.python
    return facts if python is None else replace(facts, python=str(Path(python).expanduser()))


RUNNER = LocalRunner()
