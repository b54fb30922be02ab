"""The container engine of a node, and the image of the configuration in it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.checks.finding import GIB, Check, Finding, gib
from cluster.checks.group import CheckGroup, known
from cluster.checks.groups.host import judge_room
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.lines import Answer, Filesystem
from cluster.survey.section import Question, SectionState, UnreadableError
from engine.config.cluster import ClusterConfig

# The first engine with `docker run --gpus`.
OLDEST_DOCKER = (19, 3)
# For an image whose size is not known yet: images with CUDA and PyTorch take 10 to 20 GiB, and have to fit in twice.
DOCKER_FREE_BYTES = (5 * GIB, 40 * GIB)
_NOT_NEEDED = "not needed: cluster.container.runtime is bare"
_REASONS = (
    (r"permission denied", "the user may not use the engine", "add the user to the group `docker`, log in again"),
    (
        r"cannot connect|is the docker daemon running|connection refused",
        "the engine's daemon does not answer",
        "systemctl start docker",
    ),
)

ENGINE = Question(
    "host.docker",
    20,
    r"""
set -f
engine=${BURST_ENGINE:-docker}
for hook in nvidia-container-runtime-hook nvidia-ctk; do
    command -v "$hook" >/dev/null 2>&1 && printf 'hook %s\n' "$hook"
done
set +f
for file in "$root"/etc/cdi/*nvidia* /var/run/cdi/*nvidia*; do
    [ -e "$file" ] && printf 'cdi %s\n' "${file##*/}"
done
for file in "$root/dev/nvidiactl" "$root/proc/driver/nvidia/version" /proc/driver/nvidia/version; do
    [ -e "$file" ] && echo gpus && break
done
set -f
command -v "${engine%% *}" >/dev/null 2>&1 || exit 127
# A dead daemon is no reason for some versions to exit with anything but 0: only a server version counts.
# Field by field: the whole answer may hold the password of a proxy.
$engine info --format 'ServerVersion {{json .ServerVersion}}
DockerRootDir {{json .DockerRootDir}}
Driver {{json .Driver}}
Runtimes {{json .Runtimes}}' || exit 1
folder=$($engine info --format '{{.DockerRootDir}}') && stat -f -c 'docker %S %b %a %c %d %T' -- "$folder"
exit 0
""",
)

IMAGE = Question(
    "host.image",
    20,
    r"""
set -f
engine=${BURST_ENGINE:-docker}
[ -n "${BURST_IMAGE:-}" ] || { echo unset; exit 0; }
command -v "${engine%% *}" >/dev/null 2>&1 || exit 127
$engine image inspect --format 'image {{json .Architecture}} {{json .Os}} {{json .Created}} {{json .RootFS.Layers}}
size {{json .Size}}' -- "$BURST_IMAGE"
""",
)


@dataclass(frozen=True)
class Image:
    """The image of the configuration on a node; identity: sha256 over what it is, equal wherever it is the same."""

    identity: str
    size_bytes: int


def check_docker(check: Check, facts: NodeFacts) -> list[Finding]:
    """The container engine answers and is new enough."""
    try:
        answer = _answer(facts)
        version = engine_version(facts)
    except UnreadableError as error:
        return [_silent(check, facts, error)]
    folder, driver = (one_line(str(answer.json(name)), 80) for name in ("DockerRootDir", "Driver"))
    check = check.expecting(f"{OLDEST_DOCKER[0]}.{OLDEST_DOCKER[1]:02} or newer")
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})", version)
    if numbers is None:
        return [check.unknown(f"its version says nothing: {one_line(version, 60)}")]
    text = f"{one_line(version, 60)}, images in {folder} ({driver})"
    if (int(numbers[1]), int(numbers[2])) < OLDEST_DOCKER:
        return [check.fail(text, "`docker run --gpus` needs a newer engine: update it")]
    return [check.ok(text)]


def _silent(check: Check, facts: NodeFacts, error: UnreadableError) -> Finding:
    """Why no engine answers; SKIP where none is needed."""
    section, command = facts.section(ENGINE), facts.config.container.command
    if not facts.in_containers:
        return check.skip(f"{'not installed' if section.tool_missing else 'does not answer'}; {_NOT_NEEDED}")
    check, why = check.expecting("an engine that answers"), one_line(section.output, 200)
    if section.tool_missing:
        return check.fail(
            f"{command} is not installed", f"install it, or set cluster.container.command (now {command})"
        )
    for pattern, text, remedy in _REASONS if section.state is SectionState.ENDED else ():
        if re.search(pattern, why, re.IGNORECASE):
            return check.fail(text, remedy, why)
    return check.unknown(str(error), f"run `{command} info` on the node", why)


def check_docker_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """The engine's folder can hold the image twice: it is packed and unpacked there."""
    try:
        folder, room = _engine_room(facts)
    except UnreadableError as error:
        return [_not_answering(check, facts, error)]
    check = check.on(folder).expecting(f"at least {gib(DOCKER_FREE_BYTES[1])} free")
    if room is None:
        return [check.unknown("its file system could not be asked", f"run `df {folder}` on the node")]
    if not facts.in_containers:
        return [check.ok(f"{gib(room.free_bytes)} free; {_NOT_NEEDED}")]
    return [judge_room(check, room, DOCKER_FREE_BYTES)]


def check_docker_gpu(check: Check, facts: NodeFacts) -> list[Finding]:
    """Containers can be given GPUs: the NVIDIA runtime or CDI is set up."""
    check = check.expecting("GPUs reach containers")
    try:
        answer = _answer(facts)
        runtimes = answer.json("Runtimes")
    except UnreadableError as error:
        return [_not_answering(check, facts, error)]
    if "gpus" not in answer.lines:
        return [check.skip("the NVIDIA driver is not loaded")]
    ways = [f"runtime {name}" for name in sorted(runtimes if isinstance(runtimes, dict) else ()) if "nvidia" in name]
    ways += [f"hook {name}" for name in answer.values("hook") if name == "nvidia-container-runtime-hook"]
    ways += [f"CDI {name}" for name in answer.values("cdi")]
    if ways:
        return [check.ok(", ".join(one_line(way, 60) for way in ways))]
    text = "no NVIDIA runtime, hook or CDI device list"
    if not facts.in_containers:
        return [check.skip(f"{text}; {_NOT_NEEDED}")]
    return [check.fail(text, "install nvidia-container-toolkit, then restart docker")]


def _not_answering(check: Check, facts: NodeFacts, error: UnreadableError) -> Finding:
    return (
        check.unknown("the container engine does not answer") if facts.in_containers else _silent(check, facts, error)
    )


def _answer(facts: NodeFacts) -> Answer:
    """Section host.docker. Raises UnreadableError when no engine answers: a version of the server is the only proof."""
    answer = facts.answer(ENGINE)
    version = answer.json("ServerVersion")
    if not isinstance(version, str) or not version:
        raise answer.unreadable("the engine's daemon does not answer")
    return answer


def engine_version(facts: NodeFacts) -> str:
    """Raises UnreadableError."""
    return str(_answer(facts).json("ServerVersion"))


def _engine_room(facts: NodeFacts) -> tuple[str, Filesystem | None]:
    """(the engine's folder, its file system; None when that could not be asked). Raises UnreadableError."""
    answer = _answer(facts)
    return str(answer.json("DockerRootDir")), answer.filesystem("docker") if answer.values("docker") else None


def check_image(check: Check, facts: NodeFacts) -> list[Finding]:
    """The image of the configuration is there, and the same one on all nodes."""
    name = facts.config.container.image
    if not facts.in_containers or name is None:
        return [check.skip(_NOT_NEEDED if name else "cluster.container.image is not set")]
    if _is_absent(facts):
        return [check.warn(f"{name} is not on the node", "distribute it with `burst image push`")]
    image = read_image(facts)
    return [check.ok(f"{name}: {image.identity[:12]}, {gib(image.size_bytes)}")]


def read_image(facts: NodeFacts) -> Image:
    """Raises UnreadableError when the node has no such image.

    The identity is over architecture, system, time of creation and layers: an engine's own id differs between the two
    ways in which Docker stores images.
    """
    answer = facts.answer(IMAGE)
    line, decoder, values = answer.value("image"), json.JSONDecoder(), []
    try:
        while line:
            value, end = decoder.raw_decode(line)
            values.append(value)
            line = line[end:].lstrip()
    except ValueError as error:
        raise answer.unreadable("no description of an image") from error
    if len(values) != 4 or not isinstance(values[3], list) or not values[3]:
        raise answer.unreadable("no layers")
    identity = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return Image(identity, int(answer.number("size")))


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
        try:
            folder, room = _engine_room(facts)
        except UnreadableError:
            room = None
        needed = size if images[node] is not None else 2 * size
        if room is not None and room.free_bytes < needed:
            check = Check(node, "host.docker_disk", f"at least {gib(needed)} free for {name}", folder)
            remedy = "remove images that nobody uses: `docker image prune -a`"
            found.append(check.fail(f"{gib(room.free_bytes)} free", remedy))
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
    image = known(read_image, facts)
    return {"host.docker": known(engine_version, facts), "host.image": image.identity if image is not None else None}


GROUP = CheckGroup(
    "host",
    (check_docker, check_docker_disk, check_docker_gpu, check_image),
    questions=(ENGINE, IMAGE),
    settings=_settings,
    traits=_traits,
    compare=compare_images,
)
