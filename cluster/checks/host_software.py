"""What is installed on a node: Python packages, NCCL settings, container engine, image, shared folder."""

from __future__ import annotations

import re

from cluster.checks.finding import Finding
from cluster.checks.host_room import judge_room
from cluster.checks.report import Part, Report, gib
from cluster.parse.host import (
    GIB,
    Engine,
    NcclSettings,
    Software,
    gpu_ways,
    image_absent,
    needs_gpu_containers,
    parse_engine,
    parse_image,
    parse_nccl_settings,
    parse_shared,
    parse_software,
)
from cluster.parse.unreadable import UnreadableError
from cluster.probe.section import NodeProbe, Section, SectionState
from cluster.remote_text import one_line
from engine.config_cluster import ClusterConfig

OLDEST_PYTHON = (3, 11)  # of ranks
OLDEST_NODE_PYTHON = (3, 9)  # of what supervises them
# The first engine with `docker run --gpus`.
OLDEST_DOCKER = (19, 3)
# For an image whose size is not known yet: images with CUDA and PyTorch take 10 to 20 GiB, and have to fit in twice.
DOCKER_FREE_BYTES = (5 * GIB, 40 * GIB)
SHARED_FREE_BYTES = (1 * GIB, 50 * GIB)
# Left behind after debugging, each of these makes a run slow without a word.
CRIPPLING = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_IGNORE_NET_MISMATCH": "1",
    "NCCL_DEBUG": "TRACE",
}
_NOT_NEEDED = "not needed: cluster.container.runtime is bare"
_DENIED = re.compile(r"permission denied", re.IGNORECASE)
_UNANSWERED = re.compile(r"cannot connect|is the docker daemon running|connection refused", re.IGNORECASE)


def judge_software(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.python, host.torch and host.nccl."""
    software = parse_software(probe)
    python = _judge_python(Report(probe.node, "host.python"), config, software)
    return [python, *_judge_packages(probe, config, software)]


def _judge_python(report: Report, config: ClusterConfig, software: Software) -> Finding:
    has_ranks = config.container.runtime != "docker"
    oldest = ".".join(map(str, OLDEST_PYTHON if has_ranks else OLDEST_NODE_PYTHON))
    remedy = f"install Python {oldest} or newer"
    remedy += ", or set cluster.container.runtime=docker" if has_ranks else " as python3: it supervises the ranks"
    if software.python is None:
        return report.fail("no python3", remedy)
    version = tuple(int(part) for part in software.python.split(".")[:2])
    if version < OLDEST_NODE_PYTHON:
        return report.fail(f"{software.python} is older than {oldest}", remedy)
    if has_ranks and version < OLDEST_PYTHON:
        return report.warn(f"{software.python} is older than {oldest}", remedy)
    return report.ok(software.python)


def _judge_packages(probe: NodeProbe, config: ClusterConfig, software: Software) -> list[Finding]:
    torch, nccl = Report(probe.node, "host.torch"), Report(probe.node, "host.nccl")
    if config.container.runtime == "docker":
        return [torch.skip("ranks use that of the image"), nccl.skip("ranks use that of the image")]
    if software.python is None:
        return [torch.skip("no python3"), nccl.skip("no python3")]
    if software.packages is None:
        text = f"Python {software.python} cannot list its packages"
        return [torch.unknown(text), nccl.unknown(text)]
    if "torch" not in software.packages:
        text = f"{config.python or 'python3'}, the Python of the ranks, has no PyTorch"
        return [torch.warn(text, "install burst there, or name another by cluster.python"), nccl.skip(text)]
    version = software.packages["torch"]
    found = nccl.ok(software.nccl) if software.nccl else nccl.skip("not a package of its own")
    return [torch.ok(version), found]


def judge_nccl(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.nccl_conf: NCCL settings that lie around on the node, and which of them cripple."""
    settings = parse_nccl_settings(probe)
    report = Report(probe.node, "host.nccl_conf", "nothing that switches a fast path off")
    named = _settings(settings)
    if not named:
        return [report.ok("no NCCL_* is set")]
    text = ", ".join(f"{name}={one_line(value, 60)} ({place})" for place, name, value in named)
    bad = [name for _, name, value in named if CRIPPLING.get(name) == value.strip()]
    if bad:
        return [report.warn(text, f"remove {', '.join(sorted(set(bad)))}, or know why it is there")]
    return [report.ok(text)]


def _settings(settings: NcclSettings) -> list[tuple[str, str, str]]:
    places = (("/etc/nccl.conf", settings.system), ("~/.nccl.conf", settings.user), ("session", settings.session))
    return [(place, name, value) for place, found in places for name, value in sorted(found.items())]


def nccl_trait(settings: NcclSettings) -> str:
    """All settings as one text, for comparing nodes."""
    return ", ".join(f"{place}: {name}={value}" for place, name, value in _settings(settings)) or "none"


def judge_engine(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.docker, host.docker_disk and host.docker_gpu; SKIP where ranks run without containers and none is there."""
    try:
        engine = parse_engine(probe)
    except UnreadableError as error:
        return _judge_silent_engine(probe, config, error)
    return [
        _judge_version(probe, engine),
        _judge_docker_room(probe, config, engine),
        _judge_gpu_ways(probe, config, engine),
    ]


def _judge_silent_engine(probe: NodeProbe, config: ClusterConfig, error: UnreadableError) -> list[Finding]:
    section, names = probe.section("host.docker"), ("host.docker", "host.docker_disk", "host.docker_gpu")
    if config.container.runtime != "docker":
        text = "not installed" if section.tool_missing else "does not answer"
        return [Report(probe.node, name).skip(f"{text}; {_NOT_NEEDED}") for name in names]
    rest = [Report(probe.node, name).unknown("the container engine does not answer") for name in names[1:]]
    return [_why_silent(Report(probe.node, names[0], "an engine that answers"), section, config, error), *rest]


def _why_silent(report: Report, section: Section, config: ClusterConfig, error: UnreadableError) -> Finding:
    why, command = one_line(section.output, 200), config.container.command
    if section.tool_missing:
        remedy = f"install it, or set cluster.container.command (now {command})"
        return report.fail(f"{command} is not installed", remedy)
    if section.state is SectionState.ENDED and _DENIED.search(why):
        return report.fail("the user may not use the engine", "add the user to the group `docker`, log in again", why)
    if section.state is SectionState.ENDED and _UNANSWERED.search(why):
        return report.fail("the engine's daemon does not answer", "systemctl start docker", why)
    return report.unknown(str(error), f"run `{command} info` on the node", why)


def _judge_version(probe: NodeProbe, engine: Engine) -> Finding:
    oldest = f"{OLDEST_DOCKER[0]}.{OLDEST_DOCKER[1]:02}"
    report = Report(probe.node, "host.docker", f"{oldest} or newer")
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})", engine.version)
    text = f"{one_line(engine.version, 60)}, images in {one_line(engine.folder, 80)} ({one_line(engine.driver, 40)})"
    if numbers is None:
        return report.unknown(f"its version says nothing: {one_line(engine.version, 60)}")
    if (int(numbers[1]), int(numbers[2])) < OLDEST_DOCKER:
        return report.fail(text, "`docker run --gpus` needs a newer engine: update it")
    return report.ok(text)


def _judge_docker_room(probe: NodeProbe, config: ClusterConfig, engine: Engine) -> Finding:
    report = Report(probe.node, "host.docker_disk", f"at least {gib(DOCKER_FREE_BYTES[1])} free", engine.folder)
    if engine.room is None:
        return report.unknown("its file system could not be asked", f"run `df {engine.folder}` on the node")
    if config.container.runtime != "docker":
        return report.ok(f"{gib(engine.room.free_bytes)} free; {_NOT_NEEDED}")
    return judge_room(report, engine.room, DOCKER_FREE_BYTES)


def _judge_gpu_ways(probe: NodeProbe, config: ClusterConfig, engine: Engine) -> Finding:
    report = Report(probe.node, "host.docker_gpu", "GPUs reach containers")
    section = probe.section("host.docker")
    if not needs_gpu_containers(section):
        return report.skip("the NVIDIA driver is not loaded")
    ways = gpu_ways(section, engine.runtimes)
    if ways:
        return report.ok(", ".join(one_line(way, 60) for way in ways))
    text, remedy = "no NVIDIA runtime, hook or CDI device list", "install nvidia-container-toolkit, then restart docker"
    if config.container.runtime != "docker":
        return report.skip(f"{text}; {_NOT_NEEDED}")
    return report.fail(text, remedy)


def judge_image(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.image: whether the node has the image; that it is the same one everywhere is a trait."""
    name, report = config.container.image, Report(probe.node, "host.image")
    if config.container.runtime != "docker" or name is None:
        return [report.skip(_NOT_NEEDED if name else "cluster.container.image is not set")]
    if image_absent(probe):
        return [report.warn(f"{name} is not on the node", "distribute it with `burst image push`")]
    image = parse_image(probe)
    if image is None:
        return [report.unknown("the probe was not told which image", "a bug in burst: please report it")]
    return [report.ok(f"{name}: {image.identity[:12]}, {gib(image.size_bytes)}")]


def judge_shared(probe: NodeProbe, config: ClusterConfig) -> list[Finding]:
    """host.shared: whether the shared folder is there; that all see the same one is proven by writing and reading."""
    section, report = probe.section("host.shared"), Report(probe.node, "host.shared", device=config.shared_folder)
    if config.shared_folder is None:
        return [report.skip("cluster.shared_folder is not set")]
    if section.state is SectionState.TIMED_OUT:
        return [report.fail("it does not answer", "the file server is gone or unreachable: mount it again")]
    try:
        room = parse_shared(probe)
    except UnreadableError as error:
        if section.state is not SectionState.ENDED or section.tool_missing:
            raise
        why = one_line(section.output, 200)
        return [report.fail(str(error), "mount it, or create it on the file server", why)]
    if room is None:
        return [report.unknown("the probe was not told of it", "a bug in burst: please report it")]
    return [judge_room(report, room, SHARED_FREE_BYTES)]


PARTS = (
    Part("host.software", ("host.python", "host.torch", "host.nccl"), judge_software),
    Part("host.nccl", ("host.nccl_conf",), judge_nccl),
    Part("host.docker", ("host.docker", "host.docker_disk", "host.docker_gpu"), judge_engine),
    Part("host.image", ("host.image",), judge_image),
    Part("host.shared", ("host.shared",), judge_shared),
)
