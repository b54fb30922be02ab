"""Is the shared folder the same on all nodes? Every node writes a file, and all look for all of them."""

from __future__ import annotations

import secrets
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.checks.check import GIB, Check, CheckGroup, Finding, TestBetween
from cluster.checks.groups.host import judge_room
from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import fan_out
from cluster.survey.facts import NodeFacts, build_script, new_delimiter, read_sections
from cluster.survey.section import Filesystem, Section, SectionState, UnreadableError, fill, python_question
from engine.config.cluster import ClusterConfig
from engine.config.errors import BurstError, ConfigError

CHECK = "host.shared"
TIMEOUT_S = 20
_SLACK_S = 10.0
# A client of a file server may take a moment to learn of new files.
PATIENCE_S = 3
SHARED_FREE_BYTES = (1 * GIB, 50 * GIB)
_NAMED = 5

# A dead file server hangs whoever asks: that is why this is a section of its own.
SHARED = python_question(
    "host.shared",
    10,
    r"""
try:
    told = {"room": room(os.environ["BURST_SHARED_FOLDER"]), "trouble": ""}
except OSError as error:
    told = {"room": None, "trouble": error.strerror}
print(json.dumps(told))
""",
)

# One of three steps. Every node's file has a name of its own: the common one and the node's. They are looked for by
# name, never by listing the folder: clients of file servers remember listings for up to a minute.
STEP = python_question(
    "shared.step",
    TIMEOUT_S,
    r"""
step, folder, name, node, writers = (os.environ["BURST_" + word] for word in "STEP FOLDER FILE NODE WRITERS".split())
path = lambda node: os.path.join(folder, "%s.%s" % (name, node))
told = {"error": "", "saw": [], "place": "%s, mounted at %s" % tuple(mount(folder)[:2])}
until = time.monotonic() + float(os.environ["BURST_PATIENCE"])
try:
    if step == "write":
        with open(path(node), "x") as file:  # a new file is made, or none
            file.write(os.path.basename(path(node)))
    elif step == "read":
        while time.monotonic() < until and not all(os.path.exists(path(one)) for one in writers.split()):
            time.sleep(0.2)
        for one in writers.split():
            if os.path.exists(path(one)) and pathlib.Path(path(one)).read_text() == os.path.basename(path(one)):
                told["saw"].append(one)
    else:
        for file in {path(node), *map(path, writers.split()), *map(str, pathlib.Path(folder).glob(name + ".*"))}:
            try:
                os.unlink(file)
            except (FileNotFoundError, NotADirectoryError):
                pass
except OSError as error:
    told["error"] = error.strerror
print(json.dumps(told))
""",
)


def check_shared(check: Check, facts: NodeFacts) -> list[Finding]:
    """The shared folder is one and the same: what one node writes, all others read."""
    folder, section = facts.config.shared_folder, facts.section(SHARED)
    if folder is None:
        return [check.skip("cluster.shared_folder is not set")]
    check = check.on(folder)
    if section.state is SectionState.TIMED_OUT:
        return [check.fail("it does not answer", "the file server is gone or unreachable: mount it again")]
    trouble = section.read(lambda told: str(told["trouble"]))
    if trouble:
        return [check.fail(f"the folder is not there: {trouble}", "mount it, or create it on the file server")]
    return [judge_room(check, section.read(lambda told: fill(Filesystem, told["room"])), SHARED_FREE_BYTES)]


@dataclass(frozen=True)
class Answer:
    """What a node said in one step. error: of the system. saw: the nodes whose files it read. place: where the folder
    lies there. trouble: why it did not answer; is_late: it hung."""

    error: str = ""
    saw: frozenset[str] = frozenset()
    place: str = ""
    trouble: str = ""
    is_late: bool = False


def check_shared_folder(
    connections: Mapping[str, Connection], folder: str, *, patience_s: int = PATIENCE_S
) -> list[Finding]:
    """host.shared of every node: it sees the same files as most nodes, and can write.

    Nothing stays behind, also after failures; where that cannot be done, a finding names the file. File names are
    random, and an existing file is never written. Raises ConfigError when `folder` is no absolute path.
    """
    if not folder.startswith("/") or "\0" in folder:
        raise ConfigError(f"cluster.shared_folder={folder!r} is no absolute path: it must begin with '/'.")
    settings = {"BURST_FOLDER": folder, "BURST_FILE": f".burst-check-{secrets.token_hex(16)}", "BURST_WRITERS": ""}
    settings |= {"BURST_PATIENCE": str(patience_s)}
    left: list[Finding] = []
    try:
        written = _ask_all(connections, settings | {"BURST_STEP": "write"})
        settings["BURST_WRITERS"] = " ".join(node for node, one in written.items() if not (one.error or one.trouble))
        there = {node: connections[node] for node, one in written.items() if not one.is_late}
        looked = _ask_all(there, settings | {"BURST_STEP": "read"})
    finally:
        # On every node that may see one: the node that made a file may be gone by now.
        cleaned = _ask_all(connections, settings | {"BURST_STEP": "clean"})
    if settings["BURST_WRITERS"] and all(one.error or one.trouble for one in cleaned.values()):
        path = f"{folder}/{settings['BURST_FILE']}"
        node = settings["BURST_WRITERS"].split()[0]
        left = [
            Check(node, CHECK, device=path).warn("test files may be left", f"remove: rm -f -- {shlex.quote(path)}.*")
        ]
    return [*judge_folder(folder, written, looked), *left]


def _ask_all(connections: Mapping[str, Connection], settings: Mapping[str, str]) -> dict[str, Answer]:
    """The answers of all nodes to one step."""
    hosts = [replace(connection.host, name=node) for node, connection in connections.items()]
    outcomes = fan_out(hosts, lambda host: _ask(connections[host.name], {**settings, "BURST_NODE": host.name}))
    return {node: outcome.value or Answer(trouble=one_line(str(outcome.error))) for node, outcome in outcomes.items()}


def _ask(connection: Connection, settings: Mapping[str, str]) -> Answer:
    fence = new_delimiter()
    try:
        # The step ends by its own limit; more is for a node that does not even do that.
        script = build_script([STEP], fence, settings)
        result = connection.run(["sh", "-s"], stdin=script, timeout_s=TIMEOUT_S + _SLACK_S)
        section = read_sections(result.stdout, fence).get(STEP.name, Section(STEP.name))
        if section.state is SectionState.TIMED_OUT:
            return Answer(is_late=True)
        return section.read(
            lambda told: Answer(one_line(told["error"]), frozenset(map(str, told["saw"])), one_line(told["place"]))
        )
    except SshError as error:
        return Answer(trouble=error.detail, is_late=error.kind is SshFailure.COMMAND_TIMEOUT)
    except (BurstError, UnreadableError) as error:
        return Answer(trouble=one_line(f"{error} {getattr(error, 'evidence', '')}"))


def judge_folder(folder: str, written: Mapping[str, Answer], looked: Mapping[str, Answer]) -> list[Finding]:
    """One finding per node: of different views of the folder that of more than half of the nodes is right."""
    views = Counter(one.saw for one in looked.values() if not (one.error or one.trouble))
    view, count = max(views.items(), key=lambda pair: pair[1], default=(frozenset[str](), 0))
    shared = view if view and 2 * count > views.total() else None

    def judge(node: str) -> Finding:
        check = Check(node, CHECK, "one folder for all nodes, writable on all", folder)
        steps = [written[node], looked.get(node, Answer())]
        if any(one.is_late for one in steps):
            return check.fail(f"did not answer within {TIMEOUT_S} s", "the file server is gone: mount it again")
        trouble, error = (steps[0].trouble or steps[1].trouble, steps[0].error or steps[1].error)
        if trouble:
            return check.unknown(f"no answer: {trouble}", "run the check again")
        if error:
            may = "let the user of the runs read and write there: see its mount options, mode and quota"
            return check.fail(f"cannot write or read there: {error}", may)
        mend, place = f"mount the shared folder at {folder} on {node}, as on the others", f"it lies on {steps[1].place}"
        if shared is None:
            return check.fail(f"no folder is seen by more than half of the nodes; here {place}", mend)
        if steps[1].saw == shared:
            return check.ok(f"sees what all {len(shared)} wrote")
        missing = sorted(shared - steps[1].saw)[:_NAMED]
        text = f"does not see what {', '.join(missing)} wrote" if missing else "sees files that most nodes do not"
        return check.fail(f"another folder than on most nodes: {text}; here {place}", mend)

    return [judge(node) for node in written]


def _between(config: ClusterConfig) -> Mapping[str, TestBetween]:
    """A file written to the shared folder by every node and looked for by all."""
    folder = config.shared_folder
    return {} if folder is None else {CHECK: lambda connections, nodes: check_shared_folder(connections, folder)}


GROUPS = (
    CheckGroup(
        "host",
        (check_shared,),
        questions=(SHARED,),
        settings=lambda config: {"BURST_SHARED_FOLDER": config.shared_folder},
        between=_between,
    ),
)
