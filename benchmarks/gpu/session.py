"""One session: ask the device, plan, run, judge, write."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu import blocked, loss, others, overlap, parity, probe, steps, tiles
from benchmarks.gpu.plan import Part, Row, select
from benchmarks.gpu.predictions import Predictions
from benchmarks.gpu.runner import Budget, Measures, PartDocument, Runner
from benchmarks.gpu.store import result_stem, write_document
from benchmarks.gpu.targets import judge
from benchmarks.gpu.worker import MeasurementError, Workers, error_text
from engine.config.errors import RunError
from engine.predict.machine import Peak
from engine.training.peak import above_peak_warning

SCHEMA = 1
START_TIMEOUT_S = 120.0
Size = Literal["full", "small"]


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    device: str
    size: Size
    budget_s: float
    only: tuple[str, ...]
    output_dir: Path
    command: str


@dataclass(frozen=True)
class Sizes:
    """The sizes of all parts."""

    overlap: overlap.OverlapSizes
    tiles: tiles.TileSizes
    blocked: blocked.BlockedSizes
    loss: loss.LossSizes
    parity: parity.ParitySizes
    steps: steps.StepSizes
    matmul_size: int
    small: bool = False


SIZES: dict[Size, Sizes] = {
    "full": Sizes(
        overlap.OverlapSizes(),
        tiles.TileSizes(),
        blocked.FULL,
        loss.LossSizes(),
        parity.ParitySizes(),
        steps.FULL,
        8192,
    ),
    "small": Sizes(overlap.SMALL, tiles.SMALL, blocked.SMALL, loss.SMALL, parity.SMALL, steps.SMALL, 512, small=True),
}


def plan_parts(sizes: Sizes, device: str, facts: Row) -> tuple[Part, ...]:
    """All parts in the order in which they run, their weights about minutes of a session of 45; `facts` is the probe's
    row.
    """
    return (
        overlap.plan(sizes.overlap),
        tiles.plan(sizes.tiles, facts["kernels"]),
        blocked.plan(sizes.blocked),
        *others.plan(small=sizes.small),
        loss.plan(sizes.loss),
        steps.plan(sizes.steps, device),
        parity.plan(sizes.parity),
    )


def run_session(request: Request) -> int:
    """0, or 1 when a part gave nothing but failures. Raises RunError when the device does not answer at all."""
    budget = Budget(request.budget_s)
    with contextlib.ExitStack() as stack:
        workers, facts = open_device(request.device, SIZES[request.size])
        stack.callback(workers.close)
        parts = select(plan_parts(SIZES[request.size], request.device, facts), request.only)
        name = facts["environment"]["device"] if request.device == "cuda" else "cpu"
        planned = [m for part in parts if part.name == "steps" for m in part.measurements]
        predictions = Predictions(planned, name, budget)
        stack.callback(predictions.close)
        return measure(request, budget, workers, parts, predictions, facts)


def measure(
    request: Request, budget: Budget, workers: Measures, parts: Sequence[Part], predictions: Predictions, facts: Row
) -> int:
    """Runs the parts and writes what they give; the exit code."""
    document = describe(request, facts)
    for warning in document["warnings"]:
        say(f"warning: {warning}")

    def save(done: Sequence[PartDocument], *, complete: bool = False) -> tuple[Path, Path]:
        document.update(parts=list(done), seconds=budget.used_s, complete=complete)
        document["targets"] = goals_of(document)
        return write_document(document, request.output_dir)

    def complete_steps(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        amended = predictions.amend(rows)
        return amended, steps.extrapolated(amended)

    runner = Runner(workers, budget, Peak(**facts["peak"]), save, say, predictions.ready, {"steps": complete_steps})
    done = runner.run(parts)
    for part in (part for part in done if part["name"] == "steps"):
        predictions.wait([row for row in part["rows"] if row["status"] == "measured"])
        runner.refresh(part)
    paths = save(done, complete=True)
    for verdict in document["targets"]:
        say(f"{verdict['verdict']}: {verdict['target']}: {verdict['measured']}")
    say(f"written: {paths[0]} and {paths[1]}, {budget.used_s:.0f} of {request.budget_s:.0f} s")
    failed = [part["name"] for part in done if part["status"] == "failed"]
    if failed:
        say(f"failed entirely: {', '.join(failed)}")
    return 1 if failed else 0


def open_device(device: str, sizes: Sizes) -> tuple[Workers, Row]:
    """Workers that can use the device, and the probe's row.

    A forked process cannot use a GPU that its server had opened; should an import have done that, processes are
    started from nothing instead, a few seconds each.
    """
    problem = ""
    for method in ("forkserver", "spawn"):
        workers = Workers(device, method)
        try:
            return workers, workers.call(probe.plan(sizes.tiles.head_dim, sizes.matmul_size), START_TIMEOUT_S)[0]
        except MeasurementError as error:
            problem = str(error)
            workers.close()
    raise RunError(f"bench_gpu: device {device} cannot be used: {problem}")


def describe(request: Request, facts: Row) -> dict[str, Any]:
    """The document before anything was measured."""
    environment = facts["environment"]
    return {
        "benchmark": "gpu",
        "schema": SCHEMA,
        "name": result_stem(environment["device"], environment["date"], request.only),
        "command": request.command,
        "device": request.device,
        "size": request.size,
        "budget_s": request.budget_s,
        "environment": environment,
        "peak": facts["peak"],
        "matmul_flops_per_s": facts["matmul_flops_per_s"],
        "kernels": facts["kernels"],
        "warnings": warnings_of(facts),
    }


def goals_of(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """The goals as plain values. Rows of another shape than expected must not cost a session its figures."""
    try:
        return [dataclasses.asdict(verdict) for verdict in judge(document)]
    except Exception as error:
        return [
            {"target": "all goals", "verdict": "not measured", "measured": f"cannot be judged: {error_text(error)}"}
        ]


def warnings_of(facts: Row) -> list[str]:
    """What makes all figures doubtful: a product faster than the device can be, or none at all."""
    if facts["matmul_flops_per_s"] is None:
        return [f"no matmul could be measured: {facts['matmul_error']}"]
    warning = above_peak_warning("a matmul", facts["matmul_flops_per_s"], Peak(**facts["peak"]))
    return [] if warning is None else [warning]


def say(text: str) -> None:
    """A line of progress."""
    print(text, flush=True)
