"""Which checks are wanted: --only and --skip, by group (`gpu`) or by check (`gpu.busy`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.checks.explain import EXPLANATIONS, unknown_check
from cluster.checks.finding import Finding, Verdict
from cluster.checks.groups import GROUP_NAMES
from engine.errors import ConfigError

SSH_GROUP = "ssh"
REACH = "ssh.reach"


@dataclass(frozen=True)
class Selection:
    """only: nothing else is wanted; empty: everything is. skip: not wanted. `ssh.reach` and `ssh.probe` always are."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that nodes are asked about; `ssh` needs no asking."""
        return tuple(
            name
            for name in GROUP_NAMES
            if name not in self.skip and (not self.only or any(_group(word) == name for word in self.only))
        )

    def wants(self, check: str) -> bool:
        """Whether findings of `check` are shown and count."""
        if check in _ALWAYS:
            return True
        return (not self.only or _covers(self.only, check)) and not _covers(self.skip, check)

    def apply(self, findings: Iterable[Finding]) -> list[Finding]:
        """The findings that are wanted."""
        return [finding for finding in findings if self.wants(finding.check)]

    def missing(self, node: str, findings: Sequence[Finding]) -> list[Finding]:
        """UNKNOWN for every check that --only names and that has given nothing: what nobody looked at does not pass."""
        seen = [finding.check for finding in findings]
        return [
            Finding(word, node, Verdict.UNKNOWN, "this check gave no result", "a result")
            for word in self.only
            if _group(word) != SSH_GROUP and not any(_covers((word,), check) for check in seen)
        ]


_ALWAYS = (REACH, "ssh.probe")


def read_selection(only: Iterable[str] = (), skip: Iterable[str] = ()) -> Selection:
    """The selection that these words spell, each `a,b` or repeated. Raises ConfigError, with every mistake."""
    problems: list[str] = []
    selection = Selection(_words(only, "--only", problems), _words(skip, "--skip", problems))
    problems += [
        f"--skip {word}: a node that cannot be reached is not usable; skip ssh.clock alone"
        for word in selection.skip
        if word in (SSH_GROUP, *_ALWAYS)
    ]
    if not problems and selection.only and not selection.groups and not any(map(selection.wants, selection.only)):
        problems.append("--skip takes away everything that --only names; leave one of them out")
    if problems:
        raise ConfigError(problems)
    return selection


def _words(given: Iterable[str], option: str, problems: list[str]) -> tuple[str, ...]:
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    known = {SSH_GROUP, *GROUP_NAMES, *EXPLANATIONS}
    problems += [unknown_check(option, word) for word in words if word not in known]
    return tuple(dict.fromkeys(words))


def _group(word: str) -> str:
    return word.partition(".")[0]


def _covers(words: Sequence[str], check: str) -> bool:
    return any(check == word or check.startswith(f"{word}.") for word in words)
