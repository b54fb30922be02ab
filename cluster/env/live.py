"""What is set on a node now, and where that differs from the plan. Pure: sections of a probe in, differences out.

Only variables of the families below are read and shown: an environment also holds secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.env.facts import NodeEnvironment
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.survey.section import NodeProbe, Question, Section

SESSION = "login"  # what a command over ssh inherits; of this machine: what burst itself inherited
_OURS = re.compile(r"(NCCL|GLOO|TORCH)_[A-Za-z0-9_]{1,120}|OMP_NUM_THREADS")
_RUN_ID, _RANK = "BURST_RUN_ID", "RANK"
# NCCL_CONF_FILE and the file that it names are where the others come from; they decide nothing themselves.
_HARMLESS = frozenset({"NCCL_CONF_FILE", "NCCL_VERSION"})
# A launch sets these for its run folder, which a plan made without that folder does not know.
_OF_A_RUN = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"})

SESSION_VARIABLES = Question(
    "env_live.session",
    10,
    r"""
awk 'BEGIN {
    for (name in ENVIRON) {
        if (name !~ /^((NCCL|GLOO|TORCH)_[A-Za-z0-9_]*|OMP_NUM_THREADS)$/) continue
        value = substr(ENVIRON[name], 1, 4096)
        gsub(/\n/, "\\n", value)
        printf "set\t%s=%s\n", name, value
    }
}'
""",
)

CONF_FILES = Question(
    "env_live.files",
    10,
    r"""
for file in "$root/etc/nccl.conf" "${NCCL_CONF_FILE:-$HOME/.nccl.conf}"; do
    [ -e "$file" ] || continue
    case $file in
        "$root/etc/nccl.conf") name=/etc/nccl.conf ;;
        "$HOME/.nccl.conf") name='~/.nccl.conf' ;;
        *) name=$file ;;
    esac
    printf 'file\t%s\n' "$name"
    lines=$(grep -E '^[[:space:]]*((NCCL|GLOO|TORCH)_[A-Za-z0-9_]*|OMP_NUM_THREADS)[[:space:]]*=' "$file")
    [ $? -le 1 ] || printf 'unreadable\n'
    printf '%s\n' "$lines" | head -n 200 | cut -c -4096 | sed -n "s/^[[:space:]]*\([^[:space:]]\)/set$(printf '\t')\1/p"
done
""",
)

# Processes of runs of burst, of this network namespace only: a rehearsal node shares its processes with the machine.
RUNNING = Question(
    "env_live.processes",
    30,
    r"""
here=$(readlink /proc/self/ns/net)
found=$(grep -l BURST_RUN_ID= /proc/[0-9]*/environ 2>/dev/null)
[ "$(printf '%s\n' "$found" | wc -l)" -le 2048 ] || echo unreadable
printf '%s\n' "$found" | head -n 2048 | while read -r path; do
    [ -n "$path" ] || continue
    process=${path%/environ}
    [ "$(readlink "$process/ns/net" 2>/dev/null)" = "$here" ] || continue
    printf 'process\t%s\n' "${process#/proc/}"
    tr '\n\000' ' \n' <"$path" 2>/dev/null |
        grep -E '^((NCCL|GLOO|TORCH)_[A-Za-z0-9_]*|OMP_NUM_THREADS|BURST_RUN_ID|RANK)=' |
        cut -c -4096 | sed "s/^/set$(printf '\t')/"
done
exit 0
""",
)
LIVE_QUESTIONS = (SESSION_VARIABLES, CONF_FILES, RUNNING)


@dataclass(frozen=True)
class LiveSource:
    """One place where variables are set: the ssh session, a file, a process. values: only names of our families.

    is_process: a rank is running with it, so it should be the whole plan.
    """

    place: str
    values: Mapping[str, str]
    is_process: bool = False


@dataclass(frozen=True)
class Difference:
    """One variable that is not as planned. planned, live: None where it is not set."""

    place: str
    name: str
    planned: str | None
    live: str | None

    @property
    def kind(self) -> str:
        """`unknown` to the plan, `missing` in a running process, or it `differs`."""
        return "unknown" if self.planned is None else "missing" if self.live is None else "differs"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with these names as keys."""
        return asdict(self) | {"kind": self.kind}


def read_live(probe: NodeProbe) -> tuple[LiveSource, ...]:
    """Every place where the node sets variables of ours. Raises ClusterError when one could not be looked at."""
    sections = [probe.section(question.name) for question in LIVE_QUESTIONS]
    trouble = [section.trouble() for section in sections if not section.ok]
    if "unreadable" in sections[1].output.splitlines():
        trouble.append("nccl.conf is unreadable")
    if "unreadable" in sections[2].output.splitlines():
        trouble.append("more processes of runs than are looked at")
    if trouble:
        raise ClusterError(f"{probe.node}: cannot see all that is set: {'; '.join(trouble)}")
    session, files, processes = sections
    found = [LiveSource(SESSION, _values(_settings(session.output.splitlines())))]
    found += [LiveSource(one_line(name, 120), _values(lines)) for name, lines in _blocks(files, "file")]
    for pid, lines in _blocks(processes, "process"):
        settings = dict(lines)
        run, rank = one_line(settings.get(_RUN_ID, "?"), 60), one_line(settings.get(_RANK, ""), 12)
        if rank:  # torchrun and supervisors are no ranks: what they lack says nothing
            found.append(LiveSource(f"rank {rank} of run {run} (process {pid})", _values(lines), is_process=True))
    return tuple(found)


def compare_live(environment: NodeEnvironment, live: Iterable[LiveSource]) -> tuple[Difference, ...]:
    """Where what is set is not what is planned.

    A variable that the plan does not know reaches ranks all the same, unless the launch clears it. A planned one that a
    session lacks is fine, since the launch sets it; a running rank that lacks it runs without it.
    """
    planned = {variable.name: variable.value for variable in environment.variables}
    found: list[Difference] = []
    for source in live:
        for name, value in sorted(source.values.items()):
            if value != planned.get(name) and (name in planned or _matters(name, source)):
                found.append(Difference(source.place, name, planned.get(name), value))
        for name, value in planned.items() if source.is_process else ():
            if name not in source.values:
                found.append(Difference(source.place, name, value, None))
    return tuple(found)


def _matters(name: str, source: LiveSource) -> bool:
    """Whether a variable that the plan does not set decides on the network: TORCH_ and OMP_ ones have other users."""
    if name in _HARMLESS or (source.is_process and name in _OF_A_RUN):
        return False
    return name.startswith(("NCCL_", "GLOO_"))


def _settings(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(name, value) of the lines `set<tab>NAME=VALUE`."""
    found = []
    for line in lines:
        word, _, setting = line.partition("\t")
        name, equals, value = setting.partition("=")
        if word == "set" and equals:
            found.append((name.strip(), value))
    return found


def _blocks(section: Section, word: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(what follows `word`, the settings below it)."""
    name: str | None = None
    lines: list[str] = []
    for line in [*section.output.splitlines(), f"{word}\t"]:
        first, _, rest = line.partition("\t")
        if first == word:
            if name is not None:
                yield name, _settings(lines)
            name, lines = rest, []
        else:
            lines.append(line)


def _values(settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: one_line(value, 4096) for name, value in settings if _OURS.fullmatch(name)}
