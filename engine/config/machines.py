"""Rules for the settings that say which machines a run uses, and how ranks are started there. Standard library only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from engine.config.cluster import ClusterConfig, ContainerConfig
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.planning.time.machine import find_device, find_machine, read_rates, unknown_device

# Ranks and their supervisors find each other by these.
_OURS = frozenset({"BURST_RUN_ID", "BURST_NODE", "BURST_RANK_LOGS"})
_TORCHRUN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\x00\r\n]*)", re.DOTALL)
_LOGIN = re.compile(r"[^\s-]\S*")
_TIME_LIMIT = re.compile(r"(?i:unlimited|infinite)|\d{1,7}(:\d{1,2}){1,2}|\d{1,5}-\d{1,2}(:\d{1,2}){0,2}")
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"\d{1,15}(\.\d{1,6})?([kMGTPE]i?)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def machine_problems(config: RunConfig) -> Iterator[str]:
    """One sentence per broken rule."""
    cluster = config.cluster
    for rule in (_launcher, _machine, _paths, _ssh, _environment, _slurm, _kubernetes):
        yield from rule(cluster)
    yield from _container(cluster.container)


def runs_elsewhere(cluster: ClusterConfig) -> bool:
    """Whether ranks run on machines whose disks are not ours, so that files of this one say nothing of theirs."""
    return cluster.resolved_launcher in ("ssh", "kubernetes")


def _machine(cluster: ClusterConfig) -> Iterator[str]:
    name, rates = cluster.machine.name, cluster.machine.rates
    try:
        known = name == "auto" or find_device(name)
    except ConfigError as error:  # a profile that cannot be read
        yield from (f"cluster.machine.name: {text}" for text in error.problems)
        return
    if not known:
        yield f"cluster.machine.name: {unknown_device(name, 'auto')}"
        return
    try:
        find_machine("cpu" if name == "auto" else name, read_rates(rates))
    except ConfigError as error:
        yield from (f"cluster.machine.rates: {text}" for text in error.problems)


def _launcher(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.launcher != "local":
        return
    if cluster.nodes is not None:
        yield (
            f"cluster.launcher=local starts ranks on this machine, but cluster.nodes={cluster.nodes} names others; "
            "leave one of them out, or add cluster=local"
        )
    elif (cluster.num_nodes or 1) > 1:
        yield (
            f"cluster.launcher=local starts ranks on this machine, but cluster.num_nodes={cluster.num_nodes}; "
            "leave it null (cluster.topology_nodes treats ranks as lying on several)"
        )


def _paths(cluster: ClusterConfig) -> Iterator[str]:
    """Folders and programs of nodes, where no working folder of ours means anything."""
    for name, value, homely in (
        ("shared_folder", cluster.shared_folder, False),
        ("node_folder", cluster.node_folder, True),
        ("python", cluster.python, True),
    ):
        if value is None:
            continue
        example = {"shared_folder": "/shared", "node_folder": "/scratch/burst", "python": "/opt/venv/bin/python"}[name]
        expected = f"an absolute path{' or one in the home folder (~/...)' if homely else ''}, such as {example}"
        if not value.startswith(("/", "~/") if homely else "/"):
            yield f"cluster.{name}: got {value!r}, expected {expected}"
        elif ".." in value.split("/") or _CONTROL.search(value) or (":" in value and name != "python"):
            yield f"cluster.{name}: got {value!r}, expected a path without `..`, `:` and control characters"


def _ssh(cluster: ClusterConfig) -> Iterator[str]:
    for name in ("user", "jump"):
        value = getattr(cluster.ssh, name)
        if value is not None and _LOGIN.fullmatch(value) is None:
            yield f"cluster.ssh.{name}: got {value!r}, expected a name without dash in front"


def _environment(cluster: ClusterConfig) -> Iterator[str]:
    names: set[str] = set()
    for index, setting in enumerate(cluster.environment):
        key = f"cluster.environment[{index}]"
        found = _ASSIGNMENT.fullmatch(setting)
        # The value may be a secret that came there by mistake: only what stands before it is told.
        shown = repr(setting.partition("=")[0])
        if found is None:
            yield f"{key}: {shown} is not NAME=VALUE in one line, with a name of letters, digits and _"
        elif found[1] in _OURS | _TORCHRUN:
            who = "burst" if found[1] in _OURS else "torchrun"
            yield f"{key}: {found[1]} is set by {who} for every rank; leave it out"
        elif found[1] in names:
            yield f"{key}: {found[1]} is set twice; leave one of them out"
        else:
            names.add(found[1])


def _slurm(cluster: ClusterConfig) -> Iterator[str]:
    limit = cluster.slurm.time_limit
    if limit is not None and _TIME_LIMIT.fullmatch(limit) is None:
        yield f"cluster.slurm.time_limit: got {limit!r}, expected [DAYS-]HH:MM:SS, such as 12:00:00 or 2-00:00:00"
    for index, option in enumerate(cluster.slurm.options):
        if not option.startswith("--") or _CONTROL.search(option):
            key = f"cluster.slurm.options[{index}]"
            yield f"{key}: got {option!r}, expected --NAME=VALUE, one option per item"


def _kubernetes(cluster: ClusterConfig) -> Iterator[str]:
    settings = cluster.kubernetes
    for name, pattern, expected in (
        ("claim", _DNS_NAME, "a name of lower-case letters, digits, - and ."),
        ("namespace", _DNS_NAME, "a name of lower-case letters, digits, - and ."),
        ("queue", _DNS_NAME, "a name of lower-case letters, digits, - and ."),
        ("runtime", _DNS_NAME, "a name of lower-case letters, digits, - and ."),
        ("context", _LOGIN, "a name without dash in front"),
        ("gpu_resource", _LABEL_KEY, "DOMAIN/NAME, such as nvidia.com/gpu"),
        ("memory_per_pod", _QUANTITY, "a quantity such as 200Gi"),
    ):
        value = getattr(settings, name)
        if value is not None and pattern.fullmatch(value) is None:
            key = f"cluster.kubernetes.{name}"
            yield f"{key}: got {value!r}, expected {expected}"
    for index, label in enumerate(settings.node_selector):
        key, equals, value = label.partition("=")
        if not equals or _LABEL_KEY.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
            where = f"cluster.kubernetes.node_selector[{index}]"
            yield f"{where}: got {label!r}, expected KEY=VALUE, a label of nodes"
    if cluster.resolved_launcher == "kubernetes":
        for name, given in (("kubernetes.claim", settings.claim), ("container.image", cluster.container.image)):
            if given is None:
                yield f"cluster.launcher=kubernetes needs cluster.{name}: {_NEEDED[name]}"


_NEEDED = {
    "kubernetes.claim": "the PersistentVolumeClaim (ReadWriteMany) that all pods mount, for runs and data",
    "container.image": "the image of the pods, in a registry that the nodes can pull from",
}


def _container(container: ContainerConfig) -> Iterator[str]:
    if container.runtime == "docker" and not container.image:
        yield (
            "cluster.container.runtime=docker needs an image: set cluster.container.image=NAME:TAG, the one that "
            "`burst image build --tag NAME:TAG` makes"
        )
    if container.image is not None and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}", container.image) is None:
        yield f"cluster.container.image: got {container.image!r}, expected NAME:TAG"
    if not _is_command(container.command):
        yield f"cluster.container.command: got {container.command!r}, expected a command line such as docker"
    # The value of an option may stand in an item of its own; what stands first is one.
    if container.run_options and not container.run_options[0].startswith("-"):
        yield (
            f"cluster.container.run_options: got {container.run_options[0]!r} first, expected options of `docker run`, "
            "such as --gpus=all, one per item"
        )
    for index, mount in enumerate(container.mounts):
        path = mount.removesuffix(":rw")
        if not path.startswith("/") or ":" in path or ".." in path.split("/") or _CONTROL.search(path):
            key = f"cluster.container.mounts[{index}]"
            yield f"{key}: got {mount!r}, expected an absolute path of the nodes, or PATH:rw"


def _is_command(text: str) -> bool:
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    return bool(words) and not words[0].startswith("-")
