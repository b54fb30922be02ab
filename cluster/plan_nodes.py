"""What runs on one node: torchrun, its environment, its container. One builder for all launchers. Pure.

The rendezvous is static because that of c10d numbers nodes as they come, and plans of attention rely on who lies
where.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from cluster.env.plan import (
    EnvironmentVariable,
    Format,
    NodeEnvironment,
    communicator_order,
    plan_environment,
    recorder_variables,
    render_environment,
)
from cluster.plan import Backend, NodePlan
from cluster.survey.facts import NodeFacts
from engine.config.cluster import ClusterConfig, ContainerConfig
from engine.config.settings import DataConfig, RunConfig
from engine.runs.folder import RANK_LOGS_VARIABLE, RunFolder
from engine.runs.process import NODE_VARIABLE, RUN_ID_VARIABLE

RUN_LABEL = "burst.run"
CACHE_VARIABLE = "BURST_CACHE_DIR"  # where ranks in a container keep prepared data
_MACHINE = ("--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864")
_INFINIBAND = ("--device=/dev/infiniband", "--cap-add=IPC_LOCK")


def user_options(config: ContainerConfig, owner: str, groups: Sequence[int]) -> list[str]:
    """Who the ranks are in there: `owner`, UID:GID, and its other groups, which `--user` drops: they open shared data.

    Unless the configuration names groups itself, such as podman's keep-groups, which allows no others.
    """
    if any(option.startswith("--group-add") for option in config.run_options or ()):
        groups = ()
    others = [f"--group-add={group}" for group in groups if group != int(owner.partition(":")[2])]
    return ["--user", owner, *others]


def machine_options(config: ContainerConfig, *, has_gpus: bool, has_infiniband: bool) -> tuple[str, ...]:
    """What the ranks may use of the machine, unless the configuration says it."""
    if config.run_options is not None:
        return config.run_options
    return (*_MACHINE, *(("--gpus=all",) if has_gpus else ()), *(_INFINIBAND if has_infiniband else ()))


def user_variables(home: str, user: str, cache: str) -> list[EnvironmentVariable]:
    """For a user whom the image does not know. Of its home the engine makes what lies above mounts, as root."""
    return [
        EnvironmentVariable("HOME", home, "the image knows no home of this user"),
        EnvironmentVariable("USER", user, "the image knows no name of this user"),
        EnvironmentVariable(CACHE_VARIABLE, cache, "prepared data stay on the node"),
        EnvironmentVariable("TRITON_CACHE_DIR", f"{cache}/triton", "the home is root's in there; this folder is not"),
    ]


def text_files(data: DataConfig) -> list[str]:
    """What turns text into tokens: the tokenizer's file, or its folder for a chat template in it; a template's own."""
    found = [] if data.chat_template in (None, "chatml") else [str(data.chat_template)]
    if data.tokenizer not in ("bytes", "bpe"):
        found.append(data.tokenizer if data.messages_field is None else str(PurePosixPath(data.tokenizer).parent))
    return found


def at_home(path: str, home: str) -> str:
    """`path` with `home` in place of a leading ~."""
    return f"{home}{path[1:]}" if path.startswith("~/") else path


def fixed_part(path: str) -> str:
    """The folder above the first part of `path` that is a pattern; `path` itself where none is."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if any(mark in part for mark in "*?[")), None)
    return path if first is None else "/".join(parts[:first]) or "/"


_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of all nodes meet: an address of the first node, and a port that is free there.

    port: None: of a node alone, any one. The store binds it itself, so no other process can take it before the start.
    """

    address: str
    port: int | None


@dataclass(frozen=True)
class NodeTarget:
    """A node as the plan of its ranks needs it. address: for the other nodes. folder: the run folder there.

    python, python_path, cwd: of the ranks. facts: None where nothing is known of its network. more: variables.
    owner: `UID:GID` of the ranks.
    """

    name: str
    address: str
    folder: str
    python: str
    python_path: str | None
    cwd: str
    facts: NodeFacts | None = None
    more: tuple[EnvironmentVariable, ...] = ()
    owner: str = "0:0"
    groups: tuple[int, ...] = ()
    home: str = "/"
    user: str = "root"
    has_infiniband_devices: bool = False


@dataclass(frozen=True)
class NodesBuilder:
    """Builds the plans of the nodes of one run, `count` of them. module: what every rank runs."""

    config: RunConfig
    backend: Backend
    run_id: str
    count: int
    module: str

    def node(self, rank: int, site: NodeTarget, meeting: Rendezvous | None) -> NodePlan:
        """The plan of the node with this rank. meeting: None: the node is told its place by variables of its own."""
        local_ranks, log_dir = self.backend.local_ranks, str(RunFolder(Path(site.folder)).log_dir(site.name))
        is_bare = self.config.cluster.container.runtime == "bare"
        place = () if meeting is None else self._place(rank, site, meeting, log_dir)
        torchrun = (site.python, "-m", "torch.distributed.run", *place, "--max-restarts=0", f"--rdzv-id={self.run_id}")
        bare = NodePlan(
            name=site.name,
            node_rank=rank,
            first_rank=rank * local_ranks,
            local_ranks=local_ranks,
            argv=(*torchrun, "-m", self.module, f"{site.folder}/config.yaml"),
            environment=self._environment(site, log_dir),
            cwd=site.cwd if is_bare else site.folder,
            folder=site.folder,
            log_dir=log_dir,
        )
        return bare if is_bare else self._contained(bare, site)

    def environment_text(self, node: NodePlan) -> str:
        """The environment file, a reason above each variable: for a shell, or for `docker run`."""
        form = Format.sh if node.container is None else Format.dotenv
        return render_environment(NodeEnvironment(node.name, node.environment), form)

    def _place(self, rank: int, site: NodeTarget, meeting: Rendezvous, log_dir: str) -> tuple[str, ...]:
        """Which ranks these are and where they meet the others; all of them start once every node is there."""
        if meeting.port is None:
            meet: tuple[str, ...] = ("--rdzv-backend=c10d", f"--rdzv-endpoint={meeting.address}:0")
        else:
            static = (f"--master-addr={meeting.address}", f"--master-port={meeting.port}")
            meet = (f"--node-rank={rank}", "--rdzv-backend=static", *static)
        ranks = (f"--nnodes={self.count}", f"--nproc-per-node={self.backend.local_ranks}")
        return (*ranks, *meet, f"--local-addr={site.address}", f"--log-dir={log_dir}/torchrun")

    def _environment(self, site: NodeTarget, log_dir: str) -> tuple[EnvironmentVariable, ...]:
        """The variables of the node's ranks; of those with one name the last counts."""
        cluster = self.config.cluster
        variables = [*self._of_the_run(site, log_dir), *self._of_the_backend(), *site.more]
        if site.facts is None:
            variables += recorder_variables(log_dir)
        else:
            variables += plan_environment(site.facts, cluster, log_dir=log_dir).variables
        if (threads := cluster.threads_per_rank) is not None:
            variables.append(EnvironmentVariable("OMP_NUM_THREADS", str(threads), self.backend.threads_reason))
        if cluster.container.runtime != "bare":
            variables += user_variables(site.home, site.user, cache_folder(self.config, site.home))
        for setting in cluster.environment:
            name, _, value = setting.partition("=")  # `engine.resolve.rules` has refused what is not NAME=VALUE
            variables.append(EnvironmentVariable(name, value, "cluster.environment"))
        return tuple({variable.name: variable for variable in variables}.values())

    def _of_the_run(self, site: NodeTarget, log_dir: str) -> Iterator[EnvironmentVariable]:
        """What marks the processes of a run on a node and tells them where to write."""
        marks = "marks every process of this run, so that all can be found"
        yield EnvironmentVariable(RUN_ID_VARIABLE, self.run_id, marks)
        yield EnvironmentVariable(NODE_VARIABLE, site.name, "the node, as processes and files of the run are known by")
        yield EnvironmentVariable(RANK_LOGS_VARIABLE, log_dir, "each rank writes its output to its own file there")
        safe = "a folder named engine where burst is started must not be imported"
        yield EnvironmentVariable("PYTHONSAFEPATH", "1", safe)
        yield EnvironmentVariable("PYTHONFAULTHANDLER", "1", "a crash in native code leaves Python stacks in the log")
        if site.python_path:
            yield EnvironmentVariable("PYTHONPATH", site.python_path, "where the ranks find the engine")

    def _of_the_backend(self) -> Iterator[EnvironmentVariable]:
        """What the transport of the ranks needs anywhere."""
        if self.backend.name == "nccl":
            ends = "a failed collective ends the rank, no hang"
            yield EnvironmentVariable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", ends)
            yield communicator_order()
        elif not self.config.cluster.ranks_share_device:
            yield EnvironmentVariable("CUDA_VISIBLE_DEVICES", "", "the ranks of this run compute on the CPU")

    def _contained(self, bare: NodePlan, site: NodeTarget) -> NodePlan:
        """`bare` in a container of a name that no other one of the node has."""
        config, has_gpus = self.config.cluster.container, self.backend.name == "nccl"
        name = f"burst-{self.run_id}-{_UNFIT.sub('_', site.name)}"
        options = [
            *("run", "--rm", "--init", "--name", name, "--label", f"{RUN_LABEL}={self.run_id}", "--network=host"),
            *user_options(config, site.owner, site.groups),
            *("--workdir", bare.folder, "--env-file", f"{bare.folder}/{bare.env_file}"),
            *machine_options(config, has_gpus=has_gpus, has_infiniband=site.has_infiniband_devices),
        ]
        for path, is_writable in self._mounts(site):
            options += ["--volume", f"{path}:{path}{'' if is_writable else ':ro'}"]
        # The image's own entry point is for people; torchrun needs none.
        program, *arguments = bare.argv
        command = (*shlex.split(config.command), *options, "--entrypoint", program, config.image or "", *arguments)
        return replace(bare, argv=command, container=name)

    def _mounts(self, site: NodeTarget) -> list[tuple[str, bool]]:
        """(path, is writable), every path once, writable if one asks for that; what lies below others after them."""
        config, source = self.config, self.config.train.checkpoint.resume_from
        given = [*(site.python_path or "").split(os.pathsep), *config.data.paths, *text_files(config.data)]
        read = [*map(fixed_part, given), *config.data.mix_paths, config.model.init_from or ""]
        if source is not None:  # what lies beside a checkpoint tells which disk this is
            folder = PurePosixPath(source)
            read.append(str(folder.parent if folder.name.startswith("step-") else folder))
        mounts = {path: False for path in (at_home(path, site.home) for path in read) if path.startswith("/")}
        mounts |= dict.fromkeys((site.folder, *node_folders(config, site.home)), True)
        for setting in config.cluster.container.mounts:
            path = setting.removesuffix(":rw")
            mounts[path] = mounts.get(path, False) or path != setting
        return sorted(mounts.items(), key=lambda mount: (mount[0].count("/"), mount[0]))


def socket_variable(backend: str, interface: str, reason: str) -> EnvironmentVariable:
    """The interface that ranks talk over where no adapter is chosen."""
    return EnvironmentVariable(f"{backend.upper()}_SOCKET_IFNAME", interface, reason)


def node_folders(config: RunConfig, home: str) -> tuple[str, ...]:
    """Folders that a container mounts; the engine would make them as root if they were not there before."""
    if config.cluster.container.runtime == "bare":
        return ()
    given = (config.data.prepared_dir, config.train.checkpoint.folder)
    return (cache_folder(config, home), *(at_home(folder, home) for folder in given if folder is not None))


def cache_folder(config: RunConfig, home: str) -> str:
    """Where ranks in containers keep prepared data on a node."""
    return f"{at_home(node_root(config.cluster), home)}/cache"


def node_root(cluster: ClusterConfig) -> str:
    """Where a node keeps code and runs; it may begin with ~/."""
    return (cluster.node_folder or "~/.burst").rstrip("/")
