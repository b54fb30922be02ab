"""Is the shared folder the same on all nodes? Every node writes a file, and all look for all of them."""

from __future__ import annotations

import secrets
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cluster.checks.finding import GIB, Check, Finding
from cluster.checks.group import CheckGroup, TestBetween
from cluster.checks.groups.host import judge_room
from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import fan_out
from cluster.survey.facts import NodeFacts
from cluster.survey.script import build_script, new_fence, read_sections
from cluster.survey.section import Question, Section, SectionState, UnreadableError
from cluster.survey.sysfs import Filesystem, python_question
from engine.config.cluster import ClusterConfig
from engine.config.errors import BurstError, ConfigError

CHECK = "host.shared"
TIMEOUT_S = 20
_SLACK_S = 10.0
# A client of a file server may take a moment to learn of new files.
PATIENCE_S = 3
SHARED_FREE_BYTES = (1 * GIB, 50 * GIB)
_NAMED = 5
_MAY = "let the user of the runs read and write there: see its mount options, mode and quota"

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

# The steps of the test. Every node's file has a name of its own: the common one and the node's.
_FILES = r"""
folder, name, node = (os.environ["BURST_" + word] for word in ("FOLDER", "FILE", "NODE"))
others = os.environ["BURST_WRITERS"].split()


def path(node):
    return os.path.join(folder, "%s.%s" % (name, node))


"""
WRITE = python_question(
    "shared.write",
    TIMEOUT_S,
    _FILES
    + r"""
told = {"end": "absent", "said": ""}
try:
    os.stat(os.path.join(folder, "."))
    told["end"] = "refused"
    with open(path(node), "x") as file:  # a new file is made, or none
        file.write(os.path.basename(path(node)))
    told["end"] = "written"
except OSError as error:
    told["said"] = error.strerror
print(json.dumps(told))
""",
)
# By name, never by listing the folder: clients of file servers remember listings for up to a minute.
READ = python_question(
    "shared.read",
    TIMEOUT_S,
    _FILES
    + r"""
until = time.monotonic() + float(os.environ["BURST_PATIENCE"])
while time.monotonic() < until and not all(map(os.path.exists, map(path, others))):
    time.sleep(0.2)
told = {"end": "looked", "said": "%s, mounted at %s" % tuple(mount(folder)[:2]), "saw": []}
for one in others:
    try:
        with open(path(one), errors="replace") as file:
            if file.read() == os.path.basename(path(one)):
                told["saw"].append(one)
    except FileNotFoundError:
        pass
    except OSError as error:
        told.update(end="denied", said=error.strerror)
print(json.dumps(told))
""",
)
CLEAN_UP = python_question(
    "shared.clean_up",
    TIMEOUT_S,
    _FILES
    + r"""
told = {"end": "clean", "said": ""}
for file in {path(node), *map(path, others), *map(str, pathlib.Path(folder).glob(name + ".*"))}:
    try:
        os.unlink(file)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        told = {"end": "left", "said": error.strerror}
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
    return [judge_room(check, section.read(lambda told: Filesystem.of(told["room"])), SHARED_FREE_BYTES)]


@dataclass(frozen=True)
class Answer:
    """What a node said in one step. end: written, refused or absent; looked or denied; clean or left; late or none
    where it did not answer. said: what the system said of a failure, or where the folder lies. saw: the nodes whose
    files it read."""

    end: str
    said: str = ""
    saw: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FolderTest:
    """What all nodes said, by node."""

    folder: str
    written: Mapping[str, Answer] = field(default_factory=dict)
    looked: Mapping[str, Answer] = field(default_factory=dict)

    def writers(self) -> list[str]:
        """Who made its file."""
        return [node for node, answer in self.written.items() if answer.end == "written"]

    def shared_view(self) -> frozenset[str]:
        """The files that more than half of the nodes see: there is the shared folder. Empty: it is nowhere."""
        views = Counter(answer.saw for answer in self.looked.values() if answer.end == "looked")
        view, count = max(views.items(), key=lambda pair: pair[1], default=(frozenset[str](), 0))
        return view if 2 * count > views.total() else frozenset()


def check_shared_folder(
    connections: Mapping[str, Connection], folder: str, *, patience_s: int = PATIENCE_S
) -> list[Finding]:
    """host.shared of every node: it sees the same files as most nodes, and can write.

    Nothing stays behind, also after failures; where that cannot be done, a finding names the file. File names are
    random, and an existing file is never written. Raises ConfigError when `folder` is no absolute path.
    """
    if not folder.startswith("/") or "\0" in folder:
        raise ConfigError(f"cluster.shared_folder={folder!r} is no absolute path: it must begin with '/'.")
    settings = {"BURST_FOLDER": folder, "BURST_FILE": f".burst-check-{secrets.token_hex(16)}"}
    settings |= {"BURST_WRITERS": "", "BURST_PATIENCE": str(patience_s)}
    test = FolderTest(folder)
    try:
        test = replace(test, written=_ask_all(connections, WRITE, settings))
        settings["BURST_WRITERS"] = " ".join(test.writers())
        there = {node: connections[node] for node, told in test.written.items() if told.end in ("written", "refused")}
        test = replace(test, looked=_ask_all(there, READ, settings))
    finally:
        left = _clean_up(connections, test, settings)
    return [*judge_folder(test), *left]


def _clean_up(connections: Mapping[str, Connection], test: FolderTest, settings: Mapping[str, str]) -> list[Finding]:
    """Remove the files on every node that may see one: the node that made a file may be gone by now."""
    asked = {
        node: connection
        for node, connection in connections.items()
        if not test.written or test.written[node].end not in ("absent", "none", "late")
    }
    answers = _ask_all(asked, CLEAN_UP, settings)
    path = f"{settings['BURST_FOLDER']}/{settings['BURST_FILE']}"
    stuck = [node for node, answer in answers.items() if answer.end == "left"]
    if answers and not any(answer.end == "clean" for answer in answers.values()) and not stuck:
        stuck = [node for node in answers if not test.written or test.written[node].end == "written"][:1]
    remedy = f"remove it: rm -f -- {shlex.quote(path)}.*"
    return [
        Check(node, CHECK, device=path).warn("a test file may be left", remedy, answers[node].said) for node in stuck
    ]


def _ask_all(connections: Mapping[str, Connection], step: Question, settings: Mapping[str, str]) -> dict[str, Answer]:
    """The answers of all nodes to one step."""
    hosts = [replace(connection.host, name=node) for node, connection in connections.items()]
    outcomes = fan_out(hosts, lambda host: _ask(connections[host.name], step, {**settings, "BURST_NODE": host.name}))
    return {node: outcome.value or Answer("none", one_line(str(outcome.error))) for node, outcome in outcomes.items()}


def _ask(connection: Connection, step: Question, settings: Mapping[str, str]) -> Answer:
    fence = new_fence()
    try:
        # The step ends by its own limit; more is for a node that does not even do that.
        script = build_script([step], fence, settings)
        result = connection.run(["sh", "-s"], stdin=script, timeout_s=TIMEOUT_S + _SLACK_S)
        section = read_sections(result.stdout, fence).get(step.name, Section(step.name))
        if section.state is SectionState.TIMED_OUT:
            return Answer("late")
        return section.read(
            lambda told: Answer(str(told["end"]), one_line(told["said"]), frozenset(map(str, told.get("saw", ()))))
        )
    except SshError as error:
        return Answer("late" if error.kind is SshFailure.COMMAND_TIMEOUT else "none", error.detail)
    except (BurstError, UnreadableError) as error:
        return Answer("none", one_line(f"{error} {getattr(error, 'evidence', '')}"))


def judge_folder(test: FolderTest) -> list[Finding]:
    """One finding per node."""
    return [_judge(test, node) for node in test.written]


def _judge(test: FolderTest, node: str) -> Finding:
    check = Check(node, CHECK, "one folder for all nodes, writable on all", test.folder)
    written, looked = test.written[node], test.looked.get(node)
    mend = f"mount the shared folder at {test.folder} on {node}, as on the others"
    if written.end == "absent":
        return check.fail(f"not a folder that can be looked into: {written.said}", mend)
    if "late" in (written.end, looked.end if looked else ""):
        remedy = "the file server is gone or unreachable from here: mount it again"
        return check.fail(f"did not answer within {TIMEOUT_S:g} s", remedy)
    if looked is None or looked.end not in ("looked", "denied") or written.end not in ("written", "refused"):
        why = written.said if looked is None else looked.said
        return check.unknown(f"no answer: {why}", "run the check again", why)
    bad = _judge_view(check, test, looked, mend)
    if bad is not None:
        return bad
    if written.end == "refused":
        return check.fail(f"sees the folder and cannot write: {written.said}", _MAY)
    return check.ok(f"sees what all {len(test.shared_view())} wrote" if len(test.written) > 1 else "can write and read")


def _judge_view(check: Check, test: FolderTest, looked: Answer, mend: str) -> Finding | None:
    """What is wrong with what the node sees; None when it sees what most see."""
    shared, seen = test.shared_view(), looked.saw
    if looked.end == "denied":
        return check.fail(f"may not read what others wrote: {looked.said}", _MAY)
    if not test.writers() or (shared and seen == shared):
        return None
    place = f"here it lies on {looked.said}"
    if not shared:
        return check.fail(
            f"the nodes do not share it: no folder is seen by more than half of them; {place}", mend, looked.said
        )
    others = [node for node in test.written if node in shared - seen]
    names = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
    text = f"does not see what {names} wrote" if others else "sees files that most nodes do not"
    return check.fail(f"another folder than on most nodes: {text}; {place}", mend, looked.said)


def _between(config: ClusterConfig) -> Mapping[str, TestBetween]:
    """A file written to the shared folder by every node and looked for by all."""
    folder = config.shared_folder
    return {} if folder is None else {CHECK: lambda connections, nodes: check_shared_folder(connections, folder)}


GROUP = CheckGroup(
    "host",
    (check_shared,),
    questions=(SHARED,),
    settings=lambda config: {"BURST_SHARED_FOLDER": config.shared_folder},
    between=_between,
)
