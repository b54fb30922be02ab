"""`Report`: everything that a report says, as one value that every writer reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_cli.report.baseline import Baseline
from burst_cli.report.columns import Column
from burst_cli.report.compare import Comparison
from burst_cli.report.gates import Verdict
from burst_cli.report.published import Published
from burst_cli.report.select import Group
from burst_cli.report.sweep_cells import Sweep


@dataclass(frozen=True)
class Report:
    """runs_dir: where it looked; columns: to show; warnings: sentences about damaged or lost runs and the like."""

    runs_dir: Path
    records: tuple[dict[str, Any], ...]
    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    are_columns_chosen: bool = False
    is_effective: bool = False
    sweep: Sweep | None = None
    baseline: Baseline | None = None
    comparison: Comparison | None = None
    published: tuple[Published, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The records that are runs; cells of a sweep that have none are left out."""
        return [record for record in self.records if record.get("run_id") is not None]

    @property
    def failed_gates(self) -> list[Verdict]:
        """The conditions that do not hold."""
        return [verdict for verdict in self.verdicts if not verdict.passed]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: {runs: [...]}, and a key for everything else that was asked for."""
        document: dict[str, Any] = {"runs": self.runs}
        if self.sweep is not None:
            document["sweep"] = self.sweep.to_dict()
        if self.baseline is not None:
            document["baseline"] = {"name": self.baseline.name}
        if self.comparison is not None:
            document["comparison"] = self.comparison.to_dict()
        if self.published:
            document["published"] = [row.to_dict() for row in self.published]
        if self.verdicts:
            document["gates"] = [verdict.to_dict() for verdict in self.verdicts]
        return document
