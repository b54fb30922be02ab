"""What pods print, written into the run folder as if its ranks had done so there: see `cluster.launch.pod`."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.control.evidence import torchrun_log
from cluster.launch.pod import DOCUMENTS, MARK, RECORDS
from cluster.plan import NodePlan
from engine.runs.folder import RunFolder
from engine.runs.records import parse_line, read_json_object, replace_json

# `kubectl logs --prefix --timestamps`: kubelets write times with nine digits, so they are in order as texts.
_LINE = re.compile(r"\[pod/([^/\]]{1,253})/[^\]]{1,253}\] (\d{4}-\S{10,40}) ?(.*)", re.DOTALL)
_OF_RANK = re.compile(r"rank(\d{4,9})\| (.*)", re.DOTALL)
_ERROR = re.compile(r"rank\d{4,9}\.error\.json")
_FETCHED = "fetched.json"


def split_logs(text: str) -> dict[str, list[tuple[str, str]]]:
    """By name of the pod: (time, line), in order; what no pod said is left out."""
    lines: dict[str, list[tuple[str, str]]] = {}
    for line in text.split("\n"):
        if found := _LINE.fullmatch(line):
            lines.setdefault(found[1], []).append((found[2], found[3]))
    return lines


class PodFiles:
    """The files of one node, its pod's lines so far. A pod of a later attempt has another name, and begins anew."""

    def __init__(self, run: RunFolder, node: NodePlan) -> None:
        self._run, self._node = run, node
        self._folder, self._logs = run.path / "nodes" / run.log_dir(node.name).name, run.log_dir(node.name)
        for folder in (self._folder, self._logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._fetched = read_json_object(self._folder / _FETCHED) or {}
        except (OSError, ValueError):
            self._fetched = {}

    def take(self, pod: str, lines: list[tuple[str, str]]) -> None:
        """Write those of the pod's lines that are new. Raises OSError."""
        before, count = self._fetched.get(pod, ("", 0))
        # Some runtimes give all lines of one write the same time.
        first = next((at for at, (time, _) in enumerate(lines) if time >= before), len(lines))
        new = lines[first + (count if first < len(lines) and lines[first][0] == before else 0) :]
        if not new:
            return
        by_path: dict[Path, list[str]] = {}
        for _, line in new:
            if (entry := self._place(line)) is not None:
                by_path.setdefault(entry[0], []).append(entry[1])
        for path, texts in by_path.items():
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{text}\n" for text in texts))
        last = new[-1][0]
        self._fetched = {pod: (last, sum(time == last for time, _ in lines))}
        replace_json(self._folder / _FETCHED, self._fetched)

    def note(self, name: str, document: dict[str, object]) -> None:
        """Leave a document about the node, for whoever looks at the run. Raises OSError."""
        replace_json(self._folder / name, document)

    def _place(self, line: str) -> tuple[Path, str] | None:
        """(the log to which the text is added, the text); None where the line is dealt with."""
        if found := _OF_RANK.fullmatch(line):
            rank = int(found[1])
            if self._node.first_rank <= rank < self._node.first_rank + self._node.local_ranks:
                return self._run.log_path(self._node.name, rank), found[2]
        mark, _, rest = line.partition(" ")
        name, _, text = rest.partition(" ")
        if mark != MARK:
            return torchrun_log(self._node, self._run), line
        # What ranks print is no command: names of files come from a list.
        is_first = self._node.node_rank == 0
        if (document := parse_line(text.encode("utf-8", "surrogatepass"))) is None:
            return None
        if name in RECORDS and is_first:
            return self._run.path / name, text
        if name in DOCUMENTS and is_first:
            folder = self._folder if name == DOCUMENTS[0] else self._run.path
            replace_json(folder / name, document)
        elif _ERROR.fullmatch(name):
            replace_json(self._logs / name, document)
        return None
