"""The container engine of a node, and the image of the configuration in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.checks.check import GIB, Check, CheckGroup, Finding, gib, known
from cluster.checks.groups.host import CRIPPLING, VERSIONS, judge_room
from cluster.env.plan import is_mounted
from cluster.image.engine import Image
from cluster.remote_text import one_line
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Filesystem, NotApplicableError, SectionState, UnreadableError, python_question
from engine.config.cluster import ClusterConfig

# Images with CUDA and PyTorch take 10 to 20 GiB, and have to fit in twice: they are packed and unpacked there.
DOCKER_FREE_BYTES = (5 * GIB, 40 * GIB)
_NOT_NEEDED = "not needed: cluster.container.runtime is bare"

# Nothing of the engine's warnings, which it prints beside its answers, but all that it says where it fails.
_QUERY = r"""
import shutil, subprocess

command = os.environ["BURST_ENGINE"].split()


def ask(*words):
    if shutil.which(command[0]) is None:
        sys.exit("not installed")  # no exit code: that of a missing Python is the shell's
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
    _QUERY
    + r"""
# Field by field: the whole answer may hold the password of a proxy.
fields = ",".join("{{json .%s}}" % name for name in ("ServerVersion", "DockerRootDir", "Driver", "Runtimes"))
version, folder, driver, runtimes = ask("info", "--format", "[%s]" % fields)
ways = [name for name in sorted(runtimes or ()) if "nvidia" in name]
ways += [hook for hook in ("nvidia-container-runtime-hook",) if shutil.which(hook)]
ways += ["CDI " + file.name for place in ("etc", "var/run") for file in (root / place).glob("cdi/*nvidia*")]
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
    _QUERY
    + r"""
(told,) = ask("image", "inspect", "--", os.environ.get("BURST_IMAGE", ""))
print(json.dumps({key: told[key] for key in ("Id", "Architecture", "Os", "Created", "RootFS", "Config", "Size")}))
""",
)

NCCL_CONF = "/etc/nccl.conf"
# The container is made and never started: an image need not have a program that prints a file, and none of it is run.
IMAGE_FILES = python_question(
    "host.image_files",
    30,
    _QUERY
    + f"path = {NCCL_CONF!r}\n"
    + r"""
import io, tarfile, uuid

name, image = "burst-look-" + uuid.uuid4().hex, os.environ.get("BURST_OPENED_IMAGE")
if not image:
    print(json.dumps({"conf": ""}))
    sys.exit()


def call(*words):
    return subprocess.run([*command, *words], stdin=subprocess.DEVNULL, capture_output=True)


if shutil.which(command[0]) is None:
    sys.exit("not installed")
made = call("create", "--name", name, "--pull", "never", "--network", "none", "--", image, "none")
if made.returncode:
    sys.exit(made.stderr.decode(errors="replace") or 1)
try:
    copied = call("cp", name + ":" + path, "-")
finally:
    call("rm", "-f", "-v", name)
trouble, text = copied.stderr.decode(errors="replace") if copied.returncode else "", ""
if not trouble:
    with tarfile.open(fileobj=io.BytesIO(copied.stdout)) as packed:
        file = packed.extractfile(packed.next())
        text = file.read(1 << 16).decode(errors="replace") if file else sys.exit(path + " is no file")
elif not re.search("could not find|could not be found|no such file", trouble.lower()):
    sys.exit(trouble)
print(json.dumps({"conf": text}))
""",
)


@dataclass(frozen=True)
class Engine:
    """A container engine that answers. folder: of its images. ways: in which GPUs reach containers. has_gpus: whether
    the driver is loaded. room: None where it could not be asked."""

    version: str
    folder: str
    driver: str
    ways: tuple[str, ...]
    has_gpus: bool
    room: Filesystem | None

    def __post_init__(self) -> None:
        if not self.version:
            raise ValueError("no version")


def check_docker(check: Check, facts: NodeFacts) -> list[Finding]:
    """The container engine answers."""
    section, check = facts.section(ENGINE), check.expecting("an engine that answers")
    try:
        engine = read_engine(facts)
    except UnreadableError:
        if section.state is not SectionState.ENDED or section.exit_code in (0, 127):
            raise
        remedy = "install it, start its daemon, put the user into the group `docker`, or set cluster.container.command"
        return [check.fail(f"{facts.config.container.command}: {one_line(section.output)}", remedy)]
    return [check.ok(f"{engine.version}, images in {engine.folder} ({engine.driver})")]


def check_docker_disk(check: Check, facts: NodeFacts) -> list[Finding]:
    """The engine's folder can hold the image twice: it is packed and unpacked there."""
    engine = read_engine(facts)
    if engine.room is None:
        return [check.on(engine.folder).unknown("it could not be asked", f"run `df {engine.folder}` on the node")]
    if not facts.in_containers:
        return [check.ok(f"{gib(engine.room.free)} free; {_NOT_NEEDED}")]
    return [judge_room(check.on(engine.folder), engine.room, DOCKER_FREE_BYTES)]


def check_docker_gpu(check: Check, facts: NodeFacts) -> list[Finding]:
    """Containers can be given GPUs: NVIDIA's runtime, its hook or a device list (CDI) is set up."""
    engine = read_engine(facts)
    if not engine.has_gpus:
        return [check.skip("the NVIDIA driver is not loaded")]
    if engine.ways or not facts.in_containers:
        return [check.ok(", ".join(engine.ways) or _NOT_NEEDED)]
    return [check.fail("no runtime, hook or device list of NVIDIA", "install nvidia-container-toolkit, restart docker")]


def read_engine(facts: NodeFacts) -> Engine:
    """Raises UnreadableError when no engine answers: only a version of the server proves one; NotApplicableError where
    none has to."""

    try:
        return facts.section(ENGINE).read(Engine)
    except UnreadableError as error:
        if not facts.in_containers:
            raise NotApplicableError(f"no container engine answers; {_NOT_NEEDED}") from None
        raise UnreadableError(f"no container engine answers ({error})", error.evidence, "see host.docker") from None


def check_image(check: Check, facts: NodeFacts) -> list[Finding]:
    """The image of the configuration is there, and the same one on all nodes."""
    name, section = facts.config.container.image, facts.section(IMAGE)
    if not facts.in_containers or name is None:
        return [check.skip(_NOT_NEEDED if name else "cluster.container.image is not set")]
    read_engine(facts)  # one that does not answer is told once
    # That the engine has no such image is not the same as no answer.
    if section.exit_code not in (None, 0, 127) and "no such image" in section.output.lower():
        return [check.warn(f"{name} is not on the node", "distribute it with `burst image push`")]
    return [check.ok(f"{name}: {read_image(facts).identity[:12]}")]


def check_image_nccl(check: Check, facts: NodeFacts) -> list[Finding]:
    """The image sets no variable of NCCL (ENV of its Dockerfile, or /etc/nccl.conf in it) that switches a fast path off
    in every rank."""
    container = facts.config.container
    if not facts.in_containers or container.image is None:
        return [check.skip(_NOT_NEEDED if not facts.in_containers else "cluster.container.image is not set")]
    if known(read_image, facts) is None:
        return [check.skip("see host.image")]
    settings = facts.section(IMAGE).read(lambda told: [str(one) for one in told["Config"].get("Env") or ()])
    found = dict.fromkeys(settings, "")
    if not is_mounted(NCCL_CONF, container):  # a mounted one takes the place of the image's; host.nccl_conf judges it
        lines = facts.section(IMAGE_FILES).read(lambda told: str(told["conf"]).splitlines())
        names = {one.partition("=")[0] for one in settings}  # the environment wins over the file
        pairs = ((name.strip(), value.strip()) for name, _, value in (line.partition("=") for line in lines))
        found |= {f"{name}={value}": f" ({NCCL_CONF} in the image)" for name, value in pairs if name not in names}
    bad = [
        f"{one_line(one, 200)}{place}"
        for one, place in found.items()
        if CRIPPLING.get(one.partition("=")[0]) == one.partition("=")[2]
    ]
    if not bad:
        return [check.ok("none")]
    return [check.expecting("none").warn(", ".join(bad), "build the image without it, or know why it is there")]


def read_image(facts: NodeFacts) -> Image:
    """Raises UnreadableError when the node has no such image, or one without layers."""

    def take(told: Any) -> Image:
        image = Image.of(facts.config.container.image or "", told)
        if image.layers == 0:
            raise ValueError("no layers")
        return image

    return facts.section(IMAGE).read(take)


def _compare(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """Whether engines that lack the image can take it: what it takes is known from nodes that have it."""
    images = {node: known(read_image, facts) for node, facts in nodes.items() if facts.in_containers}
    needed, found = 2 * max((image.size_bytes for image in images.values() if image), default=0), []
    for node in (node for node, image in images.items() if image is None):
        engine = known(read_engine, nodes[node])
        if engine is not None and engine.room is not None and engine.room.free < needed:
            check = Check(node, "host.docker_disk", f"{gib(needed)} for {nodes[node].config.container.image}")
            text = f"{gib(engine.room.free)} free"
            found.append(check.on(engine.folder).fail(text, "remove images that nobody uses: `docker image prune -a`"))
    return found


def _settings(config: ClusterConfig) -> Mapping[str, str | None]:
    return {"BURST_ENGINE": config.container.command, "BURST_IMAGE": config.container.image}


def _opened_settings(config: ClusterConfig) -> Mapping[str, str | None]:
    image = config.container.image if config.container.runtime == "docker" else None
    return {**_settings(config), "BURST_OPENED_IMAGE": image}


def _traits(facts: NodeFacts) -> Mapping[str, str | None]:
    image = known(read_image, facts) if facts.in_containers else None
    return {} if image is None else {VERSIONS: f"image {image.identity[:12]}"}


GROUPS = (
    CheckGroup(
        "host",
        (check_docker, check_docker_disk, check_docker_gpu, check_image),
        questions=(ENGINE, IMAGE),
        settings=_settings,
        traits=_traits,
        compare=_compare,
    ),
    # Apart: a launch does not make a container to look into.
    CheckGroup("host", (check_image_nccl,), questions=(IMAGE, IMAGE_FILES), settings=_opened_settings),
)
