from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_rig import FAST, RUN_ID, swept
from testkit.fake_plan import node_facts

from cluster.errors import HostsError
from cluster.launch.local import LocalLink, build_local_plan
from cluster.launch.runner import open_links
from cluster.launch.ssh import RUNNER, SharedPool
from cluster.plan import LaunchPlan
from cluster.ssh.pool import SshPool
from engine.config.cluster import ClusterConfig, SshConfig
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = tmp_path / RUN_ID
    folder.mkdir()
    return RunFolder(folder)


def local_plan(run: RunFolder, **ssh: object) -> LaunchPlan:
    config = RunConfig(cluster=ClusterConfig(ssh=SshConfig(**ssh)))  # type: ignore[arg-type]
    return build_local_plan(config, node_facts(), run.path)


def ssh_plan(run: RunFolder, *names: str, **ssh: object) -> LaunchPlan:
    plan = local_plan(run, **ssh)
    nodes = [replace(plan.nodes[0], name=name, node_rank=rank, folder="/there") for rank, name in enumerate(names)]
    return replace(plan, launcher="ssh", nodes=tuple(nodes))


def test_a_local_launch_does_not_load_what_ssh_takes():
    code = "import sys, cluster.launch.runner, cluster.launch.local; sys.exit('paramiko' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hosts_are_found_as_the_configuration_says_and_why_they_cannot_be_reached_is_told(run, tmp_path):
    config_file = tmp_path / "ssh_config"
    config_file.write_text("Host node1\n  HostName 127.0.0.1\n  Port 1\n")
    (link,) = RUNNER.links(ssh_plan(run, "node1", config_file=str(config_file)), run, FAST)
    try:
        link.follow()
        deadline = time.monotonic() + 200
        while "port 1" not in (link.poll().problem or "") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "port 1" in (link.poll().problem or "")
    finally:
        link.close()


def test_a_name_that_ssh_cannot_use_is_an_error_before_anything_is_opened(run):
    with pytest.raises(HostsError, match="no host name"):
        open_links(ssh_plan(run, "-oProxyCommand=evil"), run)


def test_the_pool_ends_with_the_last_link():
    ended: list[int] = []

    class Pool(SshPool):
        def close(self) -> None:
            ended.append(1)
            super().close()

    shared = SharedPool(Pool(), 2)
    shared.leave()
    assert not ended
    shared.leave()
    assert ended == [1]


def test_a_folder_that_is_gone_is_a_problem_in_words_and_raises_nothing(tmp_path):
    link = LocalLink(tmp_path / "gone", "node1")
    for ask in (link.beat, lambda: link.stop("x", 0.0), lambda: link.request_stacks("n")):
        ask()
        assert "No such file" in (link.poll().problem or "")

    assert link.poll().phase == "none"
    assert swept(link) == ()
