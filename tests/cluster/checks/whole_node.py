"""A node that answers every question, what a line of a table changes in its answer, and what is then found.

A line is CHANGES | FINDINGS, each apart by ` & `. Changes: `SECTION/PATH=VALUE` in JSON (parts of a path are keys,
places in a list, or patterns of the `device` or `name` of its rows); `TAG=VALUE` or `AFTER>TAG=VALUE` in the XML of
nvidia-smi (`TAG*`: in all GPUs); `SECTION~OLD~NEW` by a regular expression; `SECTION!CODE TEXT`, another exit code and
output (no text: as it was; `late`: its time ran out); `SECTION+COUNT LINE` of the kernel log; `cluster.NAME=VALUE` of
the configuration. Findings, by how they begin: all that is not fine (`8x WARN ...` of eight devices), and of OK and
SKIP as many as one likes, with ` => ` before words of remedy or evidence; `= CHECK: VALUE` is what the node tells to
compare. `[h100x8 docker]` is the node from there on, `$WORD = ...` an abbreviation, blanks begin the rest of a line;
`{{a b}}` makes a line of each, in which `{{}}` says which.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testkit.check_fakes import ask_here, changed_section, ended, told
from testkit.fake_plan import run_config

from cluster.checks.check import CheckGroup, Finding
from cluster.checks.selection import GROUPS
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, SectionState
from cluster.testbed.hardware.files import hardware_files
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig

GIB = 1 << 30
CLUSTERS: dict[str, dict[str, Any]] = {
    "docker": {"container": {"runtime": "docker", "image": "burst:cuda"}, "shared_folder": "/mnt/shared"},
    "bare": {},
    "nccl": {"backend": "nccl", "ranks_per_node": 4},
}


def link(name: str, *addresses: str, kind: str = "ether", up: bool = True, master: str = "", mtu: Any = 1500) -> Any:
    """One interface as a node tells it."""
    told = {"name": name, "kind": kind, "mtu": mtu, "is_up": up, "master": master or None}
    return {**told, "addresses": [*addresses]}


LO, ETH0 = link("lo", "127.0.0.1/8", kind="loopback"), link("eth0", "10.0.0.1/24")
_ROOM = {"size": 1752 * GIB, "free": 876 * GIB, "inodes": 117, "inodes_free": 110, "kind": "ext4"}
# What no rehearsal node has; the rest is asked by the real script.
BY_HAND: dict[str, Any] = {
    "net.links": {"links": [LO, ETH0], "routes": [["eth0", True, True, 0]]},
    "host.system": {
        "adapters": 2,
        "locked": -1,
        "files": [1048576, 1048576],
        "memory": [2113513980 << 10, 2080000000 << 10],
        "root": _ROOM,
        "tmp": _ROOM,
        "shm": {**_ROOM, "kind": "tmpfs"},
    },
    "host.shared": {"room": {**_ROOM, "inodes": 0, "inodes_free": 0, "kind": "nfs4"}, "trouble": ""},
    "host.software": {
        "python": "3.11.9",
        "executable": "/usr/bin/python3",
        "modules": {"torch": "2.9.1+cu128"},
        "nccl": "2.27.5",
    },
    "env_live": {"login": {}, "files": {}, "ranks": []},
    "host.docker": {
        "version": "26.1.3",
        "folder": "/var/lib/docker",
        "driver": "overlay2",
        "ways": ["nvidia"],
        "has_gpus": True,
        "room": _ROOM,
    },
    "host.image": {
        "Id": "sha256:cc",
        "Architecture": "amd64",
        "Os": "linux",
        "Created": "2026-01-05T10:00:00.123456789Z",
        "RootFS": {"Type": "layers", "Layers": ["sha256:aa", "sha256:bb"]},
        "Config": {"User": "burst", "Env": ["A=1"]},
        "Size": 18 * GIB,
    },
    "host.image_files": {"conf": ""},
}


def write_files(folder: Path, profile: str, *faults: str, number: int = 1) -> Path:
    """The files of the testbed's node of that number below `folder`; the root of its tree."""
    (folder / "root").mkdir(exist_ok=True)
    for name, file in hardware_files(profile, f"node{number}", number, faults).items():
        file.write(folder / name)
    return folder / "root"


def ask(folder: Path, *, limit_s: int = 45) -> NodeProbe:
    """What the node in `folder` tells of GPUs and adapters. limit_s: of nvidia-smi and of the ports."""
    asked = {one.name: one for group in groups("gpu", "ib") for one in group.questions}
    questions = [replace(one, limit_s=min(limit_s, one.limit_s)) for one in asked.values()]
    settings, root = {"BURST_SMI_PAUSE_S": "0"}, str(folder / "root")
    return ask_here(questions, folder, tools=folder / "bin", settings=settings, BURST_PROBE_ROOT=root)


def rehearse(folder: Path, profile: str, *faults: str, number: int = 1, limit_s: int = 45) -> NodeProbe:
    """The answer of a node with that hardware and those faults."""
    write_files(folder, profile, *faults, number=number)
    return ask(folder, limit_s=limit_s)


@functools.cache
def healthy(profile: str = "h100x8") -> NodeProbe:
    """The whole answer of a node without faults; `none` has no GPU or adapter, of `X.xml` nvidia-smi is recorded."""
    if profile.endswith(".xml"):
        return changed_section(healthy(), "gpu.smi", output=fixture_text(profile))
    with tempfile.TemporaryDirectory() as folder:
        asked = rehearse(Path(folder), profile).sections
    return NodeProbe("node1", {**asked, **{name: ended(name, json.dumps(one)) for name, one in BY_HAND.items()}})


def groups(*names: str) -> list[CheckGroup]:
    """All that have one of these names."""
    return [group for group in GROUPS if group.name in names]


def check(probe: NodeProbe, config: ClusterConfig | None = None) -> list[Finding]:
    """The findings of all groups."""
    facts = NodeFacts(probe, config or ClusterConfig())
    return [finding for group in GROUPS for finding in group.check(facts)]


def traits(probe: NodeProbe, config: ClusterConfig | None = None) -> dict[str, str]:
    """What all groups compare."""
    facts = NodeFacts(probe, config or ClusterConfig())
    return {name: value for group in GROUPS for name, value in group.told(facts).items()}


@dataclass(frozen=True)
class Row:
    """One line of a table: a node, what is changed there, what must be found."""

    profile: str
    cluster: str
    changes: tuple[str, ...]
    findings: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.profile} {self.cluster}: {' & '.join(self.changes)}"

    @property
    def config(self) -> RunConfig:
        """The configuration that the line makes."""
        return _config(self.cluster, tuple(one for one in self.changes if one.startswith("cluster.")))

    def probe(self, whole: NodeProbe | None = None) -> NodeProbe:
        """The answer that the line makes of a healthy one."""
        changes = (one for one in self.changes if not one.startswith("cluster."))
        return changed(whole or healthy(self.profile), *changes)

    def assert_holds(self) -> None:
        """Exactly what is not fine is found, with what to do about it."""
        probe, config = self.probe(), self.config.cluster
        findings = check(probe, config)
        said = sorted(
            (one.severity.is_fine, *told([one], whole=True), f"{one.remedy} {one.evidence}") for one in findings
        )
        odd = [(text, more) for is_fine, text, more in said if not is_fine]
        wanted = sorted(text for one in self.findings if not one.startswith(("OK", "SKIP", "=")) for text in _each(one))
        begins = [one.partition(" => ")[::2] for one in wanted]
        cut = [text[: len(begin)] for (text, _), (begin, _) in zip(odd, begins, strict=False)]
        assert (cut, len(odd)) == ([begin for begin, _ in begins], len(begins)), odd
        assert all(words in more for (_, more), (_, words) in zip(odd, begins, strict=True)), odd
        for begin, _, words in (one.partition(" => ") for one in self.findings if one.startswith(("OK", "SKIP"))):
            assert any(text.startswith(begin) and words in more for _, text, more in said), said
        compared = [one[2:].partition(":")[::2] for one in self.findings if one.startswith("= ")]
        values = traits(probe, config) if compared else {}
        assert {name: values.get(name, "") for name, _ in compared} == {name: value.strip() for name, value in compared}
        assert [one for one in findings if not one.severity.is_fine and not one.remedy] == []


@functools.cache
def _config(cluster: str, changes: tuple[str, ...]) -> RunConfig:
    chosen = dict(CLUSTERS[cluster])
    for path, _, value in (one.removeprefix("cluster.").partition("=") for one in changes):
        first, _, second = path.partition(".")
        chosen[first] = {**chosen.get(first, {}), second: _value(value)} if second else _value(value)
    return run_config(cluster=chosen)


def _each(words: str) -> list[str]:
    count, _, text = words.partition("x ")
    return int(count) * [text] if count.isdigit() else [words]


def rows(text: str) -> Iterator[Row]:
    """The lines of a table."""
    node, words = ("h100x8", "docker"), dict[str, str]()
    for line in filter(None, map(str.strip, re.sub(r"\n +", " ", text).splitlines())):
        if line.startswith("["):
            node = tuple(line.strip("[]").split())  # type: ignore[assignment]
        elif found := re.fullmatch(r"(\$[A-Z0-9]+) = (.*)", line):
            words[found[1]] = _spelled(found[2], words)
        elif not line.startswith("#"):
            many = re.search(r"\{\{(.+?)\}\}", line)
            for one in many[1].split() if many else [""]:
                whole = _spelled(line.replace(many[0], one).replace("{{}}", one) if many else line, words)
                parts = [tuple(filter(None, map(str.strip, half.split(" & ")))) for half in f"{whole} ".split("| ")]
                yield Row(*node, *parts)


def _spelled(text: str, words: dict[str, str]) -> str:
    known = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.sub(known, lambda found: words[found[0]], text) if words else text


def changed(probe: NodeProbe, *changes: str) -> NodeProbe:
    """`probe` after these changes; each must change something."""
    for words in changes:
        probe = _changed(probe, words)
    return probe


def _changed(probe: NodeProbe, words: str) -> NodeProbe:
    found = re.match(r"([a-z]+\.[a-z_]+|env_live)([/!~+])(.*)", words)
    if found is None:
        field, _, value = words.partition("=")
        after, _, tag = field.rpartition(">")
        count, start = (0 if tag.endswith("*") else 1), rf"(<{after}>.*?)" if after else "()"
        pattern = rf"{start}<{(tag := tag.removesuffix('*'))}>[^<]*</{tag}>"
        return _sub(probe, "gpu.smi", pattern, rf"\g<1><{tag}>{value}</{tag}>", count)
    name, how, rest = found.groups()
    output = probe.section(name).output
    code, _, text = rest.partition(" ")
    if rest == "late":
        return changed_section(probe, name, state=SectionState.TIMED_OUT, exit_code=None)
    if how == "!":
        text = output if code == rest else text.encode().decode("unicode_escape")
        return changed_section(probe, name, output=text, exit_code=int(code))
    if how == "~":
        return _sub(probe, name, *rest.split("~"), count=1)
    document = json.loads(output)
    if how == "+":
        document["seen"].append([int(code), text])
    else:
        path, _, value = rest.partition("=")
        _set(document, path.split("."), value)
    return changed_section(probe, name, output=json.dumps(document))


def _sub(probe: NodeProbe, name: str, old: str, new: str, count: int) -> NodeProbe:
    text, times = re.subn(old, new, probe.section(name).output, count=count, flags=re.DOTALL)
    assert times, old
    return changed_section(probe, name, output=text)


def _set(part: Any, path: list[str], text: str) -> None:
    name, *rest = path
    if isinstance(part, list) and not name.isdigit():
        hit = [row for row in part if re.fullmatch(name, row.get("device") or row["name"])]
        assert hit, name
        for row in hit:
            _set(row, rest, text) if rest else row.update(_value(text))
        return
    key = int(name) if isinstance(part, list) else name
    if rest:
        _set(part[key], rest, text)
    else:
        was_text = isinstance(part, dict) and isinstance(part.get(key), str)
        part[key] = text if was_text and text != "null" else _value(text)


def _value(text: str) -> Any:
    if size := re.fullmatch(r"(\d+)([MG])", text):
        return int(size[1]) << (30 if size[2] == "G" else 20)
    try:
        return json.loads(text)
    except ValueError:
        return text


def fixture_text(name: str) -> str:
    """A recorded form, from fixtures."""
    return (Path(__file__).parent / "fixtures" / name).read_text()


def in_groups(findings: Iterable[Finding], *names: str) -> list[Finding]:
    """Those of the groups."""
    return [one for one in findings if one.check.partition(".")[0] in names]
