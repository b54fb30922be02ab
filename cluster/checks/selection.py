"""Which checks there are, what each means, and which are wanted: --only and --skip, by group or check (`gpu.busy`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from cluster.checks import run
from cluster.checks.check import ALWAYS, SSH_GROUP, CheckGroup, Selection, covers
from cluster.checks.groups import engine, gpu, gpu_reports, host, ib, net, storage
from engine.config.errors import ConfigError

_FILES = (gpu, gpu_reports, ib, net, host, engine, storage)
GROUPS: tuple[CheckGroup, ...] = tuple(group for file in _FILES for group in file.GROUPS)
GROUP_NAMES = tuple(dict.fromkeys(group.name for group in GROUPS))
EXPLANATIONS: Mapping[str, str] = {
    **run.EXPLANATIONS,
    **{name: text for group in GROUPS for name, text in group.explanations().items()},
}


def read_selection(only: Iterable[str] = (), skip: Iterable[str] = ()) -> Selection:
    """The selection that these words spell, each `a,b` or repeated. Raises ConfigError, with every mistake."""
    problems: list[str] = []
    selection = Selection(_words(only, "--only", problems), _words(skip, "--skip", problems))
    problems += [
        f"--skip {word}: a node that cannot be reached is not usable; skip ssh.clock alone"
        for word in selection.skip
        if word in (SSH_GROUP, *ALWAYS)
    ]
    left = (check for check in EXPLANATIONS if selection.wants(check) and covers(selection.only, check))
    if not problems and selection.only and not any(left):
        problems.append("--skip takes away everything that --only names; leave one of them out")
    if problems:
        raise ConfigError(problems)
    return selection


def explain(word: str) -> dict[str, str]:
    """What a check (`gpu.ecc`) or each check of a group (`gpu`) means. Raises ConfigError for other words."""
    found = {name: text for name, text in EXPLANATIONS.items() if covers((word,), name)}
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
