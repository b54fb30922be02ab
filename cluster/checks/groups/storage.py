"""Is the shared folder the same on all nodes? Every node writes a file, and all look for all of them."""

from __future__ import annotations

import secrets
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.checks.finding import GIB, Check, Finding
from cluster.checks.group import CheckGroup, TestBetween
from cluster.checks.groups.host import judge_room
from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.connection import CommandResult, Connection
from cluster.ssh.hosts import fan_out
from cluster.survey.facts import NodeFacts
from cluster.survey.section import Question, SectionState
from engine.config.cluster import ClusterConfig
from engine.config.errors import BurstError, ConfigError

CHECK = "host.shared"
TIMEOUT_S = 20.0
# A client of a file server may take a moment to learn of new files.
PATIENCE_S = 3
SHARED_FREE_BYTES = (1 * GIB, 50 * GIB)
_NAMED = 5

# Every script begins with assignments: folder, file (without its last part), own (the last part), all, word, patience.
# Every line of an answer begins with $word; what else comes is what tools of the node said.
# noclobber (set -C): a new file is made, or none.
WRITE_SCRIPT = """
[ -d "$folder" ] || { ls -ld -- "$folder"; echo "$word absent"; exit 0; }
set -C
if printf '%s %s\\n' "$word" "$own" >"$folder/$file.$own"; then echo "$word written"; else echo "$word refused"; fi
"""
# By name, never by listing the folder: clients of file servers remember listings for up to a minute.
READ_SCRIPT = """
missing() { for one in $all; do [ -e "$folder/$file.$one" ] || return 0; done; return 1; }
try=0
while missing && [ $try -lt "$patience" ]; do try=$((try + 1)); sleep 1; done
for one in $all; do
    [ -e "$folder/$file.$one" ] || continue
    if seen=$(cat -- "$folder/$file.$one"); then
        if [ "$seen" = "$word $one" ]; then echo "$word saw $one"; else echo "$word wrong $one"; fi
    else
        echo "$word denied $one"
    fi
done
df -P -- "$folder" 2>/dev/null | tail -n 1
echo "$word looked"
"""
CLEAN_UP_SCRIPT = """
rm -f -- "$folder/$file.$own" "$folder/$file".*
for one in $own $all; do
    [ -e "$folder/$file.$one" ] && { ls -ld -- "$folder/$file.$one"; echo "$word left"; exit 0; }
done
echo "$word clean"
"""

SHARED = Question(
    "host.shared",
    10,
    r"""
# A dead file server hangs whoever asks: that is why this is a section of its own.
[ -n "${BURST_SHARED_FOLDER:-}" ] || { echo unset; exit 0; }
[ -d "$BURST_SHARED_FOLDER" ] || { ls -ld -- "$BURST_SHARED_FOLDER"; echo absent; exit 0; }
command -v stat >/dev/null 2>&1 || exit 127
stat -f -c 'shared %S %b %a %c %d %T' -- "$BURST_SHARED_FOLDER"
""",
)


def check_shared(check: Check, facts: NodeFacts) -> list[Finding]:
    """The shared folder is one and the same: what one node writes, all others read."""
    folder, section = facts.config.shared_folder, facts.section(SHARED)
    if folder is None:
        return [check.skip("cluster.shared_folder is not set")]
    check, why = check.on(folder), one_line(section.output, 200)
    if section.state is SectionState.TIMED_OUT:
        return [check.fail("it does not answer", "the file server is gone or unreachable: mount it again")]
    if section.state is SectionState.ENDED and section.exit_code not in (0, 127):
        return [check.fail(section.trouble(), "mount it, or create it on the file server", why)]
    answer = facts.answer(SHARED)
    if answer.last == "absent":
        return [check.fail("the folder is not there", "mount it, or create it on the file server", why)]
    if answer.last == "unset":
        return [check.unknown("the probe was not told of it", "a bug in burst: please report it")]
    return [judge_room(check, answer.filesystem("shared"), SHARED_FREE_BYTES)]


@dataclass(frozen=True)
class Answer:
    """What a node said to one script: the lines that are its answer, without the word, and what its tools said.

    failure: `late`, `none` or empty: whether it answered at all.
    """

    lines: tuple[str, ...] = ()
    said: str = ""
    failure: str = ""

    @property
    def end(self) -> str:
        """The last line of the answer, or why there is none."""
        return self.lines[-1] if self.lines and not self.failure else self.failure or "none"

    def numbers(self, key: str) -> frozenset[int]:
        """The nodes, as they are counted here, of all lines `KEY NUMBER`."""
        pairs = (line.partition(" ") for line in self.lines)
        return frozenset(int(number) for word, _, number in pairs if word == key and number.isdecimal())


@dataclass(frozen=True)
class FolderTest:
    """What all nodes said. `nodes` are counted in this order."""

    folder: str
    nodes: tuple[str, ...]
    written: Mapping[str, Answer] = field(default_factory=dict)
    looked: Mapping[str, Answer] = field(default_factory=dict)

    def writers(self) -> list[int]:
        """Who made its file."""
        return [at for at, node in enumerate(self.nodes) if self.written[node].end == "written"]

    def shared_view(self) -> frozenset[int]:
        """The files that more than half of the nodes see: there is the shared folder. Empty: it is nowhere."""
        views = Counter(answer.numbers("saw") for answer in self.looked.values() if answer.end == "looked")
        facts, count = max(views.items(), key=lambda pair: pair[1], default=(frozenset[int](), 0))
        return facts if 2 * count > views.total() else frozenset()


def check_shared_folder(
    connections: Mapping[str, Connection], folder: str, *, patience_s: int = PATIENCE_S
) -> list[Finding]:
    """host.shared of every node: it sees the same files as most nodes, and can write.

    Nothing stays behind, also after failures; where that cannot be done, a finding names the file. File names are
    random, and an existing file is never written. Raises ConfigError when `folder` is no absolute path.
    """
    if not folder.startswith("/") or "\0" in folder:
        raise ConfigError(f"cluster.shared_folder={folder!r} is no absolute path: it must begin with '/'.")
    nodes = tuple(connections)
    settings = {"folder": folder, "file": f".burst-check-{secrets.token_hex(16)}", "word": secrets.token_hex(16)}
    settings["patience"] = str(patience_s)
    test = FolderTest(folder, nodes)
    try:
        test = FolderTest(folder, nodes, _ask_all(connections, WRITE_SCRIPT, {**settings, "all": ""}))
        wanted = " ".join(map(str, test.writers()))
        there = {node: connections[node] for node in nodes if test.written[node].end in ("written", "refused")}
        looked = _ask_all(there, READ_SCRIPT, {**settings, "all": wanted}, list(nodes))
        test = FolderTest(folder, nodes, test.written, looked)
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
    wanted = " ".join(map(str, test.writers())) if test.written else ""
    answers = _ask_all(asked, CLEAN_UP_SCRIPT, {**settings, "all": wanted}, list(connections))
    path = f"{settings['folder']}/{settings['file']}"
    stuck = [node for node, answer in answers.items() if answer.end == "left"]
    if answers and not any(answer.end == "clean" for answer in answers.values()) and not stuck:
        stuck = [node for node in answers if not test.written or test.written[node].end == "written"][:1]
    remedy = f"remove it: rm -f -- {shlex.quote(path)}.*"
    return [
        Check(node, CHECK, device=path).warn("a test file may be left", remedy, answers[node].said) for node in stuck
    ]


def _ask_all(
    connections: Mapping[str, Connection], script: str, settings: Mapping[str, str], nodes: Sequence[str] = ()
) -> dict[str, Answer]:
    """The answers of all nodes to a script; `own` is a node's place in `nodes` (else in `connections`)."""
    places = {node: at for at, node in enumerate(nodes or connections)}
    hosts = [connection.host.with_name(node) for node, connection in connections.items()]
    outcomes = fan_out(
        hosts, lambda host: _ask(connections[host.name], script, {**settings, "own": str(places[host.name])})
    )
    return {
        node: outcome.value or Answer(said=one_line(str(outcome.error)), failure="none")
        for node, outcome in outcomes.items()
    }


def _ask(connection: Connection, script: str, settings: Mapping[str, str]) -> Answer:
    head = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    text = f"LC_ALL=C; export LC_ALL\n{head}{script}"
    try:
        result = connection.run(["sh", "-s"], stdin=text.encode(), timeout_s=TIMEOUT_S)
    except SshError as error:
        late = error.kind is SshFailure.COMMAND_TIMEOUT
        return Answer(said=error.detail, failure="late" if late else "none")
    except BurstError as error:
        return Answer(said=one_line(str(error)), failure="none")
    return read_answer(result, settings["word"])


def read_answer(result: CommandResult, word: str) -> Answer:
    """The lines that begin with the word, and the rest as one line."""
    lines = result.stdout.decode("utf-8", errors="replace").splitlines()
    own = tuple(line[len(word) + 1 :] for line in lines if line.startswith(f"{word} "))
    rest = " ".join(line for line in lines if not line.startswith(f"{word} "))
    said = one_line(rest.encode() + b" " + result.stderr)
    if not result.ok or not own:
        return Answer(own, said or f"exit code {result.exit_code}", "none")
    return Answer(own, said)


def judge_folder(test: FolderTest) -> list[Finding]:
    """One finding per node."""
    return [_judge(test, at, node) for at, node in enumerate(test.nodes)]


def _judge(test: FolderTest, at: int, node: str) -> Finding:
    check = Check(node, CHECK, "one folder for all nodes, writable on all", test.folder)
    written, looked = test.written[node], test.looked.get(node)
    mend = f"mount the shared folder at {test.folder} on {node}, as on the others"
    if written.end == "absent":
        return check.fail(_absent(written.said), mend, written.said)
    if "late" in (written.end, looked.end if looked else ""):
        remedy = "the file server is gone or unreachable from here: mount it again"
        return check.fail(f"did not answer within {TIMEOUT_S:g} s", remedy)
    if looked is None or looked.end != "looked" or written.end not in ("written", "refused"):
        why = written.said if looked is None else looked.said
        return check.unknown(f"no answer: {why}", "run the check again", why)
    bad = _judge_view(check, test, node, looked, mend)
    if bad is not None:
        return bad
    if written.end == "refused":
        why = reason(written.said)
        return check.fail(f"sees the folder and cannot write: {why}", _WRITING_REMEDIES.get(why, _MAY), written.said)
    return check.ok(f"sees what all {len(test.shared_view())} wrote" if len(test.nodes) > 1 else "can write and read")


def _judge_view(check: Check, test: FolderTest, node: str, looked: Answer, mend: str) -> Finding | None:
    """What is wrong with what the node sees; None when it sees what most see."""
    shared, seen = test.shared_view(), looked.numbers("saw")
    if looked.numbers("denied"):
        return check.fail(f"may not read what others wrote: {reason(looked.said)}", _MAY, looked.said)
    if looked.numbers("wrong"):
        return check.fail("a file holds other words than were written", "look at the file server", looked.said)
    if not test.writers():
        return None
    if shared and seen == shared:
        return None
    place = f"here it lies on {_mount(looked.said)}"
    if not shared:
        return check.fail(
            f"the nodes do not share it: no folder is seen by more than half of them; {place}", mend, looked.said
        )
    others = [test.nodes[number] for number in sorted(shared - seen)]
    names = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
    text = f"does not see what {names} wrote" if others else "sees files that most nodes do not"
    return check.fail(f"another folder than on most nodes: {text}; {place}", mend, looked.said)


_MAY = "let the user of the runs read and write there"
_WRITING_REMEDIES = {
    "read-only file system": "mount it read-write",
    "no space left": "free space in it",
    "disk quota exceeded": "free space in it, or raise the quota",
}


def reason(said: str) -> str:
    """The known reason among the words of a tool, else these words."""
    known = (*_WRITING_REMEDIES, "permission denied", "stale file handle")
    return next((words for words in known if words in said.lower()), said[:120] or "no reason given")


def _absent(said: str) -> str:
    words = said.lower()
    if "stale" in words:
        return "a stale mount: the file server no longer knows it"
    if "permission denied" in words:
        return "may not be looked into: permission denied"
    return "not there: not mounted" if "no such file" in words else f"not a folder: {said[:120]}"


def _mount(said: str) -> str:
    """`DEVICE, mounted at PLACE` from the line of `df -P`."""
    words = said.split()
    return f"{words[0]}, mounted at {words[5]}" if len(words) > 5 else "another disk"


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
