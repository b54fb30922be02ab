"""`Runner` for this machine: its processes, and its folders, so that there is nothing to bring anywhere."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.agent.serve import Agent
from cluster.control.link import AgentLink, NodeLink, NodeStatus
from cluster.control.runner import Runner, Survey, SurveyOptions
from cluster.plan import TRAINER_MODULE, LaunchPlan, MachineFacts, NodePlan, assemble_plan, with_ranks
from cluster.plan_nodes import NodesBuilder, NodeTarget, Rendezvous, socket_variable
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.runs.folder import RunFolder
from engine.runs.record import CODE_ROOT, output_of

_ADDRESS = "127.0.0.1"


class LocalLink(AgentLink):
    """One node of the run in folder `run`, on this machine. A run folder that cannot be written is a `problem`."""

    def __init__(self, run: Path, node: str) -> None:
        super().__init__(str(run), node, start_s=60.0)
        self._agent = Agent()

    def poll(self) -> NodeStatus:
        """What the files say now."""
        return self._ask()

    def _ask(self) -> NodeStatus:
        with self._changed:
            question = self._question(wait_s=0.0)
        self._take(question, self._agent.answer(question)[0])
        return replace(super().poll(), is_synced=self._status.outcome is not None)

    def _request(self, name: str, wish: Any) -> None:
        super()._request(name, wish)
        self._ask()


class LocalRunner(Runner):
    """Ranks of this machine."""

    is_here = True

    def survey(self, config: RunConfig, asked: SurveyOptions) -> Survey:
        cluster = config.cluster
        if cluster.nodes is not None:  # better no run than one that quietly uses this machine in place of those
            raise ConfigError(f"cluster.nodes={cluster.nodes} names other machines; add cluster=local to run here")
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
        facts = local_facts(config)
        return Survey(config, lambda config, path: build_local_plan(config, facts, path, module=asked.module))


def open_links(plan: LaunchPlan, run: RunFolder) -> list[NodeLink]:
    """See `cluster.control.runner.open_links`."""
    return [LocalLink(run.path, node.name) for node in plan.nodes]


def local_facts(config: RunConfig) -> MachineFacts:
    """This machine, with the Python that the ranks are to have."""
    facts, python = probe_local_node(), config.cluster.python
    return facts if python is None else replace(facts, python=str(Path(python).expanduser()))


def probe_local_node() -> MachineFacts:
    """The facts of this machine, this interpreter and this working folder."""
    return MachineFacts(
        hostname=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        gpus=visible_gpus(output_of("nvidia-smi", "-L") or "", os.environ),
        python=sys.executable,
        cwd=str(Path.cwd()),
        python_path=_python_path(),
        has_chosen_gpus="CUDA_VISIBLE_DEVICES" in os.environ,
    )


def visible_gpus(listing: str, environment: Mapping[str, str]) -> int:
    """How many devices `nvidia-smi -L` lists, at most as many as CUDA_VISIBLE_DEVICES names."""
    present = sum(line.startswith("GPU ") for line in listing.splitlines())
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    names = [name.strip() for name in chosen.split(",")]
    # CUDA stops at the first entry it does not know; "-1" is the usual way to hide everything.
    valid = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(present, valid)


def _python_path() -> str | None:
    """The folder of the packages before what PYTHONPATH already holds; None when they are installed."""
    if CODE_ROOT.name in ("site-packages", "dist-packages"):
        return None
    old = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(CODE_ROOT), *(entry for entry in old if entry not in ("", str(CODE_ROOT)))])


def build_local_plan(
    config: RunConfig, facts: MachineFacts, run_path: Path, *, module: str = TRAINER_MODULE
) -> LaunchPlan:
    """The plan to run `config` on the one machine described by `facts`, in the run folder `run_path` (not yet there).

    `module` is what torchrun starts on every rank with the path of config.yaml as its argument. Raises ConfigError when
    the backend that was asked for does not fit the machine.
    """
    resolved, backend = with_ranks(config, facts)
    loopback = socket_variable(backend.name, "lo", "all ranks are on this machine")
    site = NodeTarget(
        facts.hostname, _ADDRESS, str(run_path), facts.python, facts.python_path, facts.cwd, more=(loopback,)
    )
    builder = NodesBuilder(resolved, backend, run_path.name, 1, module)
    node = builder.node(0, site, Rendezvous(_ADDRESS, None))
    files = ((node.env_file, builder.environment_text(node)), ("plan.sh", _script(node, run_path)))
    # Whoever gives each run GPUs of its own may start several.
    exclusive = backend.name == "nccl" and not facts.has_chosen_gpus
    return assemble_plan("local", resolved, run_path, (node,), backend, *files, is_exclusive=exclusive)


def _script(node: NodePlan, run_path: Path) -> str:
    """The text of plan.sh: the same folder, environment and command as `burst launch`, without live progress."""
    name, log_dir, cwd = map(shlex.quote, (node.name, node.log_dir, node.cwd))
    return f"""\
#!/bin/sh
# Run {run_path.name}: starts {node.local_ranks} ranks on {name}.
# Output of the ranks: {log_dir}
set -eu
cd {cwd}
. {shlex.quote(str(run_path / node.env_file))}
exec {shlex.join(node.argv)}
"""


RUNNER = LocalRunner()
