"""The shared folder, proven by files: on this machine through real shells, and on a testbed with private mounts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from testkit.connections import LocalConnection

from cluster.checks.check import Finding, Verdict
from cluster.checks.groups.storage import Answer, check_shared_folder, judge_folder
from cluster.errors import SshError, SshFailure
from engine.config.errors import ConfigError

OK, WARN, FAIL, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN


def elsewhere(name: str, shared: Path, own: Path) -> LocalConnection:
    """A node on which the shared folder lies at another place of this machine."""
    return LocalConnection(name, given=lambda stdin: stdin.replace(str(shared).encode(), str(own).encode()))


def failing(name: str, error: BaseException | SshFailure, at: int, *, once: bool = False) -> LocalConnection:
    """A node that raises `error` at command number `at`, and at all after it unless `once`."""
    commands = itertools.count()

    def given(stdin: bytes) -> bytes:
        if (number := next(commands)) == at or (number > at and not once):
            raise SshError(name, error, "gone") if isinstance(error, SshFailure) else error
        return stdin

    return LocalConnection(name, given=given)


def local(*names: str) -> dict[str, LocalConnection]:
    return {name: LocalConnection(name) for name in names}


def verdicts(found: Sequence[Finding]) -> dict[str, Verdict]:
    return {finding.node: finding.severity for finding in found}


@pytest.mark.parametrize("name", ["plain", "it's $(touch pwned)\nünï", "-rf"])
def test_a_shared_folder_passes_and_is_left_as_it_was(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / ".burst-check-0").write_text("mine")
    assert verdicts(check_shared_folder(local("a", "b", "c"), str(folder))) == {"a": OK, "b": OK, "c": OK}
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(".burst-check-0", "mine")]
    assert not list(tmp_path.rglob("pwned"))


ELSEWHERE = "another folder than on most nodes: does not see what b, c wrote; here it lies on"


@pytest.mark.parametrize(
    ("places", "failed", "words"),
    [
        ("own shared shared", "a", ELSEWHERE),
        ("own other shared", "abc", "no folder is seen by more than half of the nodes"),
        ("shared shared nowhere", "c", "cannot write or read there: No such file"),
        ("shared shared file", "c", "cannot write or read there: Not a directory"),
    ],
)
def test_nodes_with_other_folders_at_that_place_are_named(tmp_path: Path, places: str, failed: str, words: str) -> None:
    for name in ("shared", "own", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    where = zip("abc", places.split(), strict=True)
    nodes = {name: elsewhere(name, tmp_path / "shared", tmp_path / place) for name, place in where}
    found = check_shared_folder(nodes, str(tmp_path / "shared"), patience_s=0)
    assert verdicts(found) == dict.fromkeys("abc", OK) | dict.fromkeys(failed, FAIL)
    odd = next(finding for finding in found if finding.severity is FAIL).observed
    assert odd.startswith(words)
    assert words != ELSEWHERE or ", mounted at" in odd
    assert not list(tmp_path.glob("*/*")) + list(tmp_path.glob("*/.*"))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("error", "severity", "words"),
    [(SshFailure.LOST, UNKNOWN, "no answer: gone"), (SshFailure.COMMAND_TIMEOUT, FAIL, "did not answer within 20 s")],
)
def test_a_node_that_is_lost_or_hangs_midway_leaves_nothing(
    tmp_path: Path, at: int, error: SshFailure, severity: Verdict, words: str
) -> None:
    found = check_shared_folder({**local("a", "b"), "c": failing("c", error, at)}, str(tmp_path))
    assert [(one.node, one.severity) for one in found] == [("a", OK), ("b", OK), ("c", severity)]
    assert found[2].observed == words
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_could_not_be_removed_is_named(tmp_path: Path) -> None:
    found = check_shared_folder({"a": failing("a", SshFailure.LOST, 2)}, str(tmp_path))
    assert [finding.severity for finding in found] == [OK, WARN]
    assert str(tmp_path / ".burst-check-") in found[1].remedy
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("folder", ["", "relative", "~/shared", "/a\0b"])
def test_only_absolute_paths_are_folders(folder: str) -> None:
    with pytest.raises(ConfigError, match="absolute"):
        check_shared_folder({}, folder)


def test_an_existing_file_is_never_written(tmp_path: Path) -> None:
    def given(stdin: bytes) -> bytes:
        (name,) = re.findall(rb"export BURST_FILE=(\S+)", stdin)
        (tmp_path / f"{name.decode()}.a").write_text("mine")
        return stdin

    (found, *_) = check_shared_folder({"a": LocalConnection("a", given=given)}, str(tmp_path))
    assert (found.severity, "File exists" in found.observed) == (FAIL, True)


ALL = frozenset("abc")
SAW_ALL = Answer(saw=ALL, place="/dev/sda1, mounted at /")
FINE = Answer()


@pytest.mark.parametrize(
    ("written", "looked", "expected", "words"),
    [
        (FINE, SAW_ALL, OK, "sees what all 3 wrote"),
        (Answer(error="Read-only file system"), SAW_ALL, FAIL, "cannot write or read there: Read-only file system"),
        (FINE, Answer(error="Permission denied", saw=ALL), FAIL, "cannot write or read there: Permission denied"),
        (FINE, Answer(saw=ALL - {"c"}), FAIL, "does not see what c wrote"),
        (FINE, Answer(saw=ALL | {"d"}), FAIL, "sees files that most nodes do not"),
        (FINE, Answer(saw=ALL, trouble="gone"), UNKNOWN, "no answer: gone"),
        (Answer(trouble="gone"), SAW_ALL, UNKNOWN, "no answer: gone"),
        (FINE, Answer(is_late=True), FAIL, "did not answer within 20 s"),
    ],
)
def test_what_a_node_says_decides(written: Answer, looked: Answer, expected: Verdict, words: str) -> None:
    first = judge_folder("/s", {"a": written, "b": FINE, "c": FINE}, {"a": looked, "b": SAW_ALL, "c": SAW_ALL})[0]
    assert first.severity is expected
    assert words in first.observed
    blind = judge_folder("/s", {"a": FINE, "b": FINE}, {"a": Answer(), "b": Answer()})
    assert verdicts(blind) == {"a": FAIL, "b": FAIL}  # files that nobody sees are no shared folder


def test_an_answer_that_makes_no_sense_is_none(tmp_path: Path) -> None:
    for told in (b"null", b'{"error": "", "saw": 5, "place": ""}', b"Welcome!"):
        node = LocalConnection(
            "a", given=lambda text, told=told: text.replace(b"json.dumps(told)", repr(told.decode()).encode())
        )
        found = check_shared_folder({"a": node, **local("b", "c")}, str(tmp_path))
        assert verdicts(found) == {"a": UNKNOWN, "b": OK, "c": OK}


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        check_shared_folder({"a": failing("a", KeyboardInterrupt(), 1, once=True)}, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
