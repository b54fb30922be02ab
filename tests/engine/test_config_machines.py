from __future__ import annotations

from typing import Any

import pytest

from engine.config.machines import runs_elsewhere
from engine.config.rules import config_problems
from engine.config.settings import RunConfig, config_from_dict


def texts(**cluster: Any) -> list[str]:
    return [problem.text for problem in config_problems(configured(**cluster))]


def configured(**cluster: Any) -> RunConfig:
    return config_from_dict({"cluster": cluster})


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ({"launcher": "local", "nodes": "n[1-4]"}, "cluster.launcher=local starts ranks on this machine, but"),
        ({"launcher": "local", "num_nodes": 2}, "cluster.launcher=local starts ranks on this machine, but"),
        ({"python": "python3"}, "cluster.python: got 'python3', expected an absolute path or one in the home folder"),
        ({"node_folder": "burst"}, "cluster.node_folder: got 'burst', expected an absolute path or one in the home"),
        ({"node_folder": "~/../x"}, "cluster.node_folder: got '~/../x', expected a path without `..`"),
        ({"node_folder": "/a:b"}, "cluster.node_folder: got '/a:b', expected a path without"),
        ({"shared_folder": "~/x"}, "cluster.shared_folder: got '~/x', expected an absolute path, such as /shared"),
        ({"environment": ["A"]}, "cluster.environment[0]: 'A' is not NAME=VALUE in one line"),
        ({"environment": ["1A=b"]}, "cluster.environment[0]: '1A' is not NAME=VALUE in one line"),
        ({"environment": ["A=b\nc"]}, "cluster.environment[0]: 'A' is not NAME=VALUE in one line"),
        ({"environment": ["A=1", "A=2"]}, "cluster.environment[1]: A is set twice"),
        ({"environment": ["BURST_NODE=x"]}, "cluster.environment[0]: BURST_NODE is set by burst for every rank"),
        ({"environment": ["MASTER_PORT=1"]}, "cluster.environment[0]: MASTER_PORT is set by torchrun"),
        ({"slurm": {"time_limit": "soon"}}, "cluster.slurm.time_limit: got 'soon', expected [DAYS-]HH:MM:SS"),
        ({"slurm": {"options": ["-p main"]}}, "cluster.slurm.options[0]: got '-p main', expected --NAME=VALUE"),
        ({"container": {"runtime": "docker"}}, "cluster.container.runtime=docker needs an image"),
        ({"container": {"image": "-v /:/x"}}, "cluster.container.image: got '-v /:/x', expected NAME:TAG"),
        ({"container": {"command": "'docker"}}, 'cluster.container.command: got "\'docker", expected a command line'),
        ({"container": {"command": "  "}}, "cluster.container.command: got '  ', expected a command line"),
        ({"container": {"run_options": ["all"]}}, "cluster.container.run_options: got 'all' first, expected options"),
        ({"container": {"mounts": ["data"]}}, "cluster.container.mounts[0]: got 'data', expected an absolute path"),
        ({"container": {"mounts": ["/a:/b"]}}, "cluster.container.mounts[0]: got '/a:/b', expected an absolute path"),
        ({"ssh": {"user": "-x"}}, "cluster.ssh.user: got '-x', expected a name without dash in front"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_what_was_expected(cluster: dict[str, Any], text: str) -> None:
    (found,) = texts(**cluster)
    assert found.startswith(text)


def test_a_secret_that_came_into_a_name_is_not_told() -> None:
    (found,) = texts(environment=["TOKEN=canary-7f3a\n"])
    assert "canary" not in found


@pytest.mark.parametrize(
    "cluster",
    [
        {
            "nodes": "n[1-4]",
            "python": "~/venv/bin/python",
            "node_folder": "/scratch/me",
            "environment": ["A=b=c", "B="],
        },
        {"launcher": "slurm", "slurm": {"time_limit": "2-00:00:00", "options": ["--reservation=x"]}},
        {"container": {"image": "registry.local:5000/a/b@sha256:00", "command": "sudo -n docker", "mounts": ["/a:rw"]}},
        {"container": {"run_options": ["--gpus", "all"]}},
        {"container": {"run_options": []}},
    ],
)
def test_settings_that_work_are_accepted(cluster: dict[str, Any]) -> None:
    assert texts(**cluster) == []


def test_files_of_this_machine_are_looked_for_only_if_ranks_run_on_it() -> None:
    data = {"format": "text", "paths": ["/none/corpus.txt"]}

    def missing(cluster: dict[str, Any]) -> bool:
        config = config_from_dict({"cluster": cluster, "data": data})
        return any("no such file" in problem.text for problem in config_problems(config))

    assert missing({})
    assert missing({"launcher": "slurm", "num_nodes": 2})
    assert not missing({"nodes": "n1"})
    assert not missing({"launcher": "ssh"})
    assert runs_elsewhere(configured(nodes="n1").cluster)
