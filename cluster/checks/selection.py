"""Which checks there are, what each means, and which are wanted: --only and --skip, by group or check (`gpu.busy`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.checks import ssh
from cluster.checks.finding import Finding, Verdict
from cluster.checks.group import CheckGroup
from cluster.checks.groups import dcgm, engine, gpu, gpu_links, gpu_log, host, ib, net, software, storage
from engine.config.errors import ConfigError

_FILES = (gpu, gpu_log, gpu_links, ib, net, host, software, engine, storage)
GROUPS: tuple[CheckGroup, ...] = (
    *(file.GROUP for file in _FILES),
    *(software.NCCL_SETTINGS, dcgm.MONITOR, dcgm.DIAGNOSTIC),
)
GROUP_NAMES = tuple(dict.fromkeys(group.name for group in GROUPS))
EXPLANATIONS: Mapping[str, str] = {
    **ssh.EXPLANATIONS,
    **{name: text for group in GROUPS for name, text in group.explanations().items()},
}
SSH_GROUP = "ssh"
_ALWAYS = (ssh.REACH, ssh.PROBE)


@dataclass(frozen=True)
class Selection:
    """only: nothing else is wanted; empty: everything is. skip: not wanted. `ssh.reach` and `ssh.probe` always are."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def wants(self, check: str) -> bool:
        """Whether findings of `check` are shown and count."""
        if check in _ALWAYS:
            return True
        return (not self.only or _covers(self.only, check)) and not _covers(self.skip, check)

    def apply(self, node: str, findings: Iterable[Finding], between: Iterable[str] = ()) -> tuple[Finding, ...]:
        """The findings of a node that are wanted, with UNKNOWN for every check that --only names and that gave nothing.

        What nobody looked at does not pass; of a node that was not reached that is said already. between: checks that
        need other nodes.
        """
        found = tuple(finding for finding in findings if self.wants(finding.check))
        if any(finding.check == ssh.REACH and finding.severity is not Verdict.OK for finding in found):
            return found
        why = dict.fromkeys(between, "it is made between nodes, and no other was reached")
        missing = (
            Finding(word, node, Verdict.UNKNOWN, why.get(word, "this check gave no result"), "a result")
            for word in self.only
            if _group(word) != SSH_GROUP and not any(_covers((word,), finding.check) for finding in found)
        )
        return (*found, *missing)


def read_selection(only: Iterable[str] = (), skip: Iterable[str] = ()) -> Selection:
    """The selection that these words spell, each `a,b` or repeated. Raises ConfigError, with every mistake."""
    problems: list[str] = []
    selection = Selection(_words(only, "--only", problems), _words(skip, "--skip", problems))
    problems += [
        f"--skip {word}: a node that cannot be reached is not usable; skip ssh.clock alone"
        for word in selection.skip
        if word in (SSH_GROUP, *_ALWAYS)
    ]
    left = (check for check in EXPLANATIONS if selection.wants(check) and _covers(selection.only, check))
    if not problems and selection.only and not any(left):
        problems.append("--skip takes away everything that --only names; leave one of them out")
    if problems:
        raise ConfigError(problems)
    return selection


def explain(word: str) -> dict[str, str]:
    """What a check (`gpu.ecc`) or each check of a group (`gpu`) means. Raises ConfigError for other words."""
    found = {name: text for name, text in EXPLANATIONS.items() if _covers((word,), name)}
    if not found:
        raise ConfigError(_unknown_check("--explain", word))
    return found


def _words(given: Iterable[str], option: str, problems: list[str]) -> tuple[str, ...]:
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    known = {SSH_GROUP, *GROUP_NAMES, *EXPLANATIONS}
    problems += [_unknown_check(option, word) for word in words if word not in known]
    return tuple(dict.fromkeys(words))


def _unknown_check(option: str, word: str) -> str:
    """What is wrong with `word`, which names neither a group nor a check."""
    near = difflib.get_close_matches(word, EXPLANATIONS, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "`burst check-nodes --explain gpu` lists the checks of a group"
    groups = ", ".join((SSH_GROUP, *GROUP_NAMES))
    return f"{option} {word!r}: expected a group ({groups}) or a check of one, such as gpu.busy; {hint}"


def _group(word: str) -> str:
    return word.partition(".")[0]


def _covers(words: Sequence[str], check: str) -> bool:
    return any(check == word or check.startswith(f"{word}.") for word in words)
