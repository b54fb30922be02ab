"""A sweep on disk: runs/sweeps/<sweep id>/sweep.json: its cells, and the run folder of each that was begun.

The path of a cell's run folder is recorded before its launch is started, and a launch refuses a folder that exists. So
whatever is killed at whatever moment, a cell has one run folder, and who comes back finds it. What became of a cell is
recorded once, by its run; `SweepFolder.cells` reads it there:

    pending, running, completed, failed, oom, cancelled    as its run says, which may not be there yet
    oom (predicted), illegal                               of a cell that is expected not to fit, or cannot run
    failed                                                 also when its launch was refused or lost, with `refused`
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_cli.runs.choose import SWEEPS
from burst_cli.runs.read import run_record
from cluster.remote_text import table, word
from engine.config.errors import BurstError, ConfigError
from engine.config.schema import nearest
from engine.runs.files import read_json_object, replace_json
from engine.runs.folder import FINAL_STATES, RunFolder

FORMAT = 1


class SweepError(BurstError):
    """A sweep cannot be read, written or taken up."""


@dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk."""

    path: Path

    @property
    def sweep_id(self) -> str:
        """Its name."""
        return self.path.name

    @property
    def file(self) -> Path:
        """What is recorded of it."""
        return self.path / "sweep.json"

    def read(self) -> dict[str, Any]:
        """The content of sweep.json. Raises SweepError when there is none, or it is damaged."""
        try:
            document = read_json_object(self.file)
        except (OSError, ValueError) as error:
            raise SweepError(f"{self.file} is damaged: {error}") from error
        cells = document.get("cells") if document is not None and document.get("format") == FORMAT else None
        if document is None or not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
            raise SweepError(f"{self.file} does not describe a sweep that this version knows")
        return document

    def write(self, document: Mapping[str, Any]) -> None:
        """Replace sweep.json. Only the holder of `locked` calls this."""
        try:
            replace_json(self.file, document)
        except OSError as error:
            raise SweepError(f"{self.file} cannot be written: {error.strerror}") from error

    def cells(self) -> list[dict[str, Any]]:
        """The recorded cells with {state, started_at, ended_at, exit_code, result} of each. Raises SweepError."""
        return [{**cell, **self.now(cell)} for cell in self.read()["cells"]]

    def run_of(self, cell: Mapping[str, Any]) -> RunFolder | None:
        """The run of a recorded cell, which may have moved with all others; None where it has none yet."""
        path = Path(word(cell, "run_path", 4096) or "/")
        found = (folder for folder in (path, self.path.parent.parent.joinpath(*path.parts[-2:])))
        return next((RunFolder(folder.absolute()) for folder in found if (folder / "run.json").is_file()), None)

    def now(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """{state, started_at, ended_at, exit_code, result} of a cell, as its run tells them; None is not known."""
        run = self.run_of(cell)
        record: Mapping[str, Any] = run_record(run) if run is not None else {}
        state, result = self._state(cell, record)
        times = {key: record.get(key) for key in ("started_at", "ended_at", "exit_code")}
        return {"state": state, "result": result, **times}

    @staticmethod
    def _state(cell: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
        if record.get("status") in FINAL_STATES:
            return str(record["status"]), {"message": table(record, "failure").get("message")}
        if refused := cell.get("refused"):
            return "failed", {"message": refused}
        if record:
            return "running", None
        if cell.get("problems"):
            return "illegal", None
        if cell.get("short_of_memory") and cell.get("run_path") is None:
            return "oom", {"predicted": True, "message": cell["short_of_memory"]}
        return "pending", None

    def update_cell(self, cell_id: str, **facts: Any) -> None:
        """Merge `facts` into one cell. Only the holder of `locked` calls this."""
        document = self.read()
        for cell in document["cells"]:
            if cell["id"] == cell_id:
                cell.update(facts)
        self.write(document)

    def output_path(self, cell_id: str) -> Path:
        """Where the output of the launches of one cell goes."""
        return self.path / "cells" / f"{cell_id}.log"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the sweep: two controllers at once would run cells twice. Raises SweepError while somebody does."""
        descriptor = os.open(self.path / "sweep.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 20).decode("ascii", errors="replace").strip() or "unknown"
                raise SweepError(
                    f"sweep {self.sweep_id} is being run by process {holder}; stop that one first, or wait for it"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode("ascii"), 0)
            yield
        finally:
            os.close(descriptor)


def sweeps_dir(runs_dir: Path) -> Path:
    """Where sweeps are kept, beside the runs that they started."""
    return runs_dir / SWEEPS


def find_sweep(runs_dir: Path, name: str) -> SweepFolder:
    """The sweep whose id is, or begins or ends with, `name`. Raises ConfigError when there is none, or several."""
    every = [SweepFolder(file.parent) for file in sorted(sweeps_dir(runs_dir).glob("*/sweep.json"))]
    exact = [one for one in every if one.sweep_id == name]
    found = exact or [one for one in every if one.sweep_id.startswith(name) or one.sweep_id.endswith(f"-{name}")]
    if len(found) == 1:
        return found[0]
    known = [one.sweep_id for one in every]
    if found:
        raise ConfigError(f"sweep {name}: {len(found)} sweeps are meant: {', '.join(one.sweep_id for one in found)}")
    near = nearest(name, known)
    advice = f"did you mean {near}?" if near else f"there are: {', '.join(known) or 'none'}"
    raise ConfigError(f"sweep {name}: not in {sweeps_dir(runs_dir)}; {advice}")
