"""Real runs on a testbed without torch: SSH links, supervisors and a controller lead fake ranks on several nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from testkit import KIT, PYTHON_PATH
from testkit.process_table import kill_run

from cluster.control.link import NodeLink
from cluster.control.open import open_links
from cluster.control.ssh_link import LinkTiming
from cluster.env.facts import EnvironmentVariable
from cluster.facts import NodeFacts
from cluster.plan import LaunchPlan, NodePlan, build_launch_plan, with_files
from cluster.testbed.build import Testbed
from engine.config import RunConfig, TrainConfig
from engine.config_cluster import ClusterConfig, SshConfig
from engine.runs import RunFolder, create_run, new_run_path

LINKS = LinkTiming(first_pause_s=0.2, longest_pause_s=1.0, silence_s=4.0, start_s=60.0)
LOCAL_RANKS = 2


class TestbedRun:
    """A run of fake ranks in `mode` on all nodes of `testbed`, of which rank `bad_rank` misbehaves."""

    __test__ = False

    def __init__(self, testbed: Testbed, base: Path, mode: str, *, bad_rank: int = 3, lease_s: float = 60.0) -> None:
        self.testbed = testbed
        self.plan = self._plan(base, mode, bad_rank, lease_s)
        self.run = create_run(Path(self.plan.run_path), dict(self.plan.files))

    def links(self) -> list[NodeLink]:
        return open_links(self.plan, self.run, LINKS)

    def mend(self) -> None:
        """From the next attempt on no rank misbehaves."""
        nodes = []
        for node in self.plan.nodes:
            variables = [replace(one, value="ok") if one.name == "FAKE_MODE" else one for one in node.environment]
            nodes.append(replace(node, environment=tuple(variables)))
        self.plan = replace(self.plan, nodes=tuple(nodes))

    def there(self, node: str) -> RunFolder:
        """The run folder on a node, which lies on this machine's disk, too."""
        return RunFolder(Path(next(part.folder for part in self.plan.nodes if part.name == node)))

    def kill(self) -> None:
        kill_run(self.run.run_id)

    def _plan(self, base: Path, mode: str, bad_rank: int, lease_s: float) -> LaunchPlan:
        folder = self.testbed.folder
        ssh = SshConfig(config_file=str(folder.ssh_config), known_hosts=str(folder.known_hosts))
        cluster = ClusterConfig(ranks_per_node=LOCAL_RANKS, lease_s=lease_s, ssh=ssh, launcher="ssh")
        config = RunConfig(cluster=cluster, train=TrainConfig(steps=5, seq_len=64))
        path = new_run_path(base / "runs", "tiny")
        facts = NodeFacts(self.testbed.node_names[0], 2, 0, sys.executable, "/", PYTHON_PATH)
        plan = build_launch_plan(config, facts, path, module="fake_trainer")
        nodes = tuple(self._node(plan, number, mode, bad_rank) for number in range(len(self.testbed.node_names)))
        world_size = LOCAL_RANKS * len(nodes)
        return with_files(replace(plan, nodes=nodes, world_size=world_size, launcher="ssh"))

    def _node(self, plan: LaunchPlan, number: int, mode: str, bad_rank: int) -> NodePlan:
        name = self.testbed.node_names[number]
        folders = [
            str(self.testbed.node(each).folder.home / ".burst" / "runs" / plan.run_id)
            for each in (name, self.testbed.node_names[0])
        ]
        argv = (sys.executable, str(KIT / "fake_torchrun.py"), str(LOCAL_RANKS), "fake_trainer")
        logs = f"{folders[0]}/logs/{name}"
        more = {
            "FAKE_MODE": mode, "FAKE_RANK": str(bad_rank), "FAKE_LEAD": folders[1],
            "FAKE_FIRST_RANK": str(number * LOCAL_RANKS), "BURST_NODE": name, "BURST_RANK_LOGS": logs,
        }  # fmt: skip
        kept = [variable for variable in plan.nodes[0].environment if variable.name not in more]
        return NodePlan(
            name=name,
            node_rank=number,
            first_rank=number * LOCAL_RANKS,
            local_ranks=LOCAL_RANKS,
            argv=(*argv, f"{folders[0]}/config.yaml"),
            environment=(*kept, *(EnvironmentVariable(key, value, "for the test") for key, value in more.items())),
            cwd="/",
            folder=folders[0],
            log_dir=logs,
        )


def rank_numbers(run: RunFolder, node: str) -> Sequence[str]:
    """Logs of ranks that arrived from a node."""
    return sorted(path.name for path in run.log_dir(node).glob("rank*.log"))
