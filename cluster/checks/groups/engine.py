"""The container engine of a node, and the image of the configuration in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.checks.finding import GIB, Check, Finding, gib
from cluster.checks.group import AbsentError, CheckGroup, known
from cluster.checks.groups.host import judge_room
from cluster.checks.groups.software import VERSIONS
from cluster.image.engine import Image
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.section import UnreadableError
from cluster.survey.sysfs import Filesystem, python_question
from engine.config.cluster import ClusterConfig

# For an image whose size is not known yet: images with CUDA and PyTorch take 10 to 20 GiB, and have to fit in twice.
DOCKER_FREE_BYTES = (5 * GIB, 40 * GIB)
_NOT_NEEDED = "not needed: cluster.container.runtime is bare"
_REASONS = (
    (r"^no program ", "not installed", "install it, or set cluster.container.command"),
    (r"permission denied", "this user may not use it", "add the user to the group `docker`, log in again"),
    (
        r"cannot connect|is the docker daemon running|connection refused",
        "its daemon does not answer",
        "systemctl start docker",
    ),
)

# Nothing of the engine's warnings, which it prints beside its answers, but all that it says where it fails.
_ASKING = r"""
import shutil, subprocess

command = os.environ["BURST_ENGINE"].split()


def ask(*words):
    if shutil.which(command[0]) is None:
        sys.exit("no program " + command[0])  # no exit code: that of a missing Python is the shell's
    asked = subprocess.run([*command, *words], stdin=subprocess.DEVNULL, capture_output=True)
    said = asked.stdout.decode(errors="replace")
    # A dead daemon is no reason for some versions to exit with anything but 0: then it has no version.
    if asked.returncode or said.startswith('[""'):
        sys.exit(asked.stderr.decode(errors="replace") or 1)
    return json.loads(said)


"""

ENGINE = python_question(
    "host.docker",
    20,
    _ASKING
    + r"""
# Field by field: the whole answer may hold the password of a proxy.
fields = ",".join("{{json .%s}}" % name for name in ("ServerVersion", "DockerRootDir", "Driver", "Runtimes"))
version, folder, driver, runtimes = ask("info", "--format", "[%s]" % fields)
ways = ["runtime " + name for name in sorted(runtimes or ()) if "nvidia" in name]
hook = "nvidia-container-runtime-hook"
ways += ["hook " + hook] if shutil.which(hook) else []
for place in ("etc", "var/run"):
    ways += ["CDI " + file.name for file in (root / place).glob("cdi/*nvidia*")]
told = {"version": version, "folder": folder, "driver": driver, "ways": ways, "room": None}
told["has_gpus"] = (root / "dev/nvidiactl").exists() or own("proc/driver/nvidia/version").exists()
try:
    told["room"] = room(folder)
except OSError:
    pass  # the user may not look there
print(json.dumps(told))
""",
)

IMAGE = python_question(
    "host.image",
    20,
    _ASKING
    + r"""
(told,) = ask("image", "inspect", "--", os.environ.get("BURST_IMAGE", ""))
print(json.dumps({key: told[key] for key in ("Id", "Architecture", "Os", "Created", "RootFS", "Config", "Size")}))
""",
)


@dataclass(frozen=True)
class Engine:
    """A container engine that answers. folder: of its images. ways: in which GPUs reach containers.

    room: None where it could not be asked.
    """

    version: str
    folder: str
    driver: str
    ways: tuple[str, ...]
    has_gpus: bool
    room: Filesystem | None


def check_docker(check: Check, facts: NodeFacts) -> list[Finding]:
    """The container engine answers."""
    try:
        engine = read_engine(facts)
    except UnreadableError as error:
        return [_silent(check, facts, error)]
    return [check.ok(f"{engine.version}, images in {engine.folder} ({engine.driver})")]


def _silent(check: Check, facts: NodeFacts, error: UnreadableError) -> Finding:
    """Why no engine answers."""
    check, why = check.expecting("an engine that answers"), one_line(facts.section(ENGINE).output, 200)
    command = facts.config.container.command
    for pattern, text, remedy in _REASONS:
        if re.search(pattern, why, re.IGNORECASE):
            return check.fail(f"{command}: {text}", remedy, why)
    return check.unknown(str(error), f"run `{command} info` on the node", why)


def check_docker_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """The engine's folder can hold the image twice: it is packed and unpacked there."""
    engine = read_engine(facts)
    check, room = check.on(engine.folder).expecting(f"at least {gib(DOCKER_FREE_BYTES[1])} free"), engine.room
    if room is None:
        return [check.unknown("its file system could not be asked", f"run `df {engine.folder}` on the node")]
    if not facts.in_containers:
        return [check.ok(f"{gib(room.free_bytes)} free; {_NOT_NEEDED}")]
    return [judge_room(check, room, DOCKER_FREE_BYTES)]


def check_docker_gpu(check: Check, facts: NodeFacts) -> list[Finding]:
    """Containers can be given GPUs: the NVIDIA runtime or CDI is set up."""
    check, engine = check.expecting("GPUs reach containers"), read_engine(facts)
    if not engine.has_gpus:
        return [check.skip("the NVIDIA driver is not loaded")]
    if engine.ways:
        return [check.ok(", ".join(one_line(way, 60) for way in engine.ways))]
    text = "no NVIDIA runtime, hook or CDI device list"
    if not facts.in_containers:
        return [check.skip(f"{text}; {_NOT_NEEDED}")]
    return [check.fail(text, "install nvidia-container-toolkit, then restart docker")]


def read_engine(facts: NodeFacts) -> Engine:
    """Raises UnreadableError when no engine answers: a version of the server is the only proof. AbsentError where none
    has to."""

    def take(told: Any) -> Engine:
        version, folder, driver = (one_line(told[name], 80) for name in ("version", "folder", "driver"))
        if not version:
            raise ValueError("no version")
        room = None if told["room"] is None else Filesystem.of(told["room"])
        return Engine(version, folder, driver, tuple(map(str, told["ways"])), told["has_gpus"] is not False, room)

    try:
        return facts.section(ENGINE).read(take)
    except UnreadableError as error:
        if not facts.in_containers:
            raise AbsentError(f"no container engine answers; {_NOT_NEEDED}") from None
        raise UnreadableError(f"no container engine answers ({error})", error.evidence, "see host.docker") from None


def check_image(check: Check, facts: NodeFacts) -> list[Finding]:
    """The image of the configuration is there, and the same one on all nodes."""
    name = facts.config.container.image
    if not facts.in_containers or name is None:
        return [check.skip(_NOT_NEEDED if name else "cluster.container.image is not set")]
    read_engine(facts)  # one that does not answer is told once
    if _is_absent(facts):
        return [check.warn(f"{name} is not on the node", "distribute it with `burst image push`")]
    image = read_image(facts)
    return [check.ok(f"{name}: {image.identity[:12]}, {gib(image.size_bytes)}")]


def read_image(facts: NodeFacts) -> Image:
    """Raises UnreadableError when the node has no such image, or one without layers."""

    def take(told: Any) -> Image:
        image = Image.of(facts.config.container.image or "", told)
        if image.layers == 0:
            raise ValueError("no layers")
        return image

    return facts.section(IMAGE).read(take)


def compare_images(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """Of nodes that lack the image while others have it, and of those whose engine cannot take it: twice its size
    without it, once beside it. Its size is known from any node that has it."""
    nodes = {node: facts for node, facts in nodes.items() if facts.in_containers and facts.config.container.image}
    images = {node: known(read_image, facts) for node, facts in nodes.items()}
    having = [image for image in images.values() if image is not None]
    size = max((image.size_bytes for image in having), default=0)
    found = []
    for node, facts in nodes.items():
        name = facts.config.container.image
        engine, needed = known(read_engine, facts), size if images[node] is not None else 2 * size
        if engine is not None and engine.room is not None and engine.room.free_bytes < needed:
            check = Check(node, "host.docker_disk", f"at least {gib(needed)} free for {name}", engine.folder)
            remedy = "remove images that nobody uses: `docker image prune -a`"
            found.append(check.fail(f"{gib(engine.room.free_bytes)} free", remedy))
        if having and _is_absent(facts):
            text = f"{name} is on {len(having)} of {len(nodes)} nodes and not on this one"
            found.append(Check(node, "host.image").fail(text, "distribute it with `burst image push`"))
    return found


def _is_absent(facts: NodeFacts) -> bool:
    """Whether the engine answered that it has no such image, which is not the same as no answer."""
    section = facts.section(IMAGE)
    return section.exit_code not in (None, 0, 127) and "no such image" in section.output.lower()


def _settings(config: ClusterConfig) -> Mapping[str, str | None]:
    return {"BURST_ENGINE": config.container.command, "BURST_IMAGE": config.container.image}


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    image = known(read_image, facts) if facts.in_containers else None
    return {} if image is None else {VERSIONS: f"image {image.identity[:12]}"}


GROUP = CheckGroup(
    "host",
    (check_docker, check_docker_disk, check_docker_gpu, check_image),
    questions=(ENGINE, IMAGE),
    settings=_settings,
    traits=_traits,
    compare=compare_images,
)
