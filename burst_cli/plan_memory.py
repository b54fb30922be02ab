"""Memory of a planned run: what a rank needs beside what there is, and how people read it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import binary_bytes, count, seconds
from engine.config.settings import RunConfig
from engine.memory.auto import MemoryChoice, advice_for
from engine.memory.candidate import MARGIN, MemoryCandidate
from engine.memory.capacity import Capacity
from engine.memory.estimate import MemoryEstimate
from engine.memory.fit import Fit, Predict, Prediction, estimate_on, fit_of
from engine.memory.policy import policy_name
from engine.memory.predict_apart import predict_apart
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import Machine

_BAR_WIDTH = 60
_BAR_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "white", "white")
_SHOWN_CANDIDATES = 12


@dataclass(frozen=True)
class MemoryReport:
    """What one rank needs at its worst moment, exactly if it was predicted, and in closed form.

    fit      of the exact prediction, else of the closed form
    advice   what would make it fit, if it does not
    """

    config: RunConfig
    capacity: Capacity
    estimate: MemoryEstimate
    prediction: Prediction | None
    fit: Fit
    choice: MemoryChoice
    advice: tuple[str, ...] = ()

    @property
    def best(self) -> Prediction:
        """The figures that count."""
        return self.prediction or self.estimate

    @property
    def policy(self) -> str:
        """The checkpoint policy in words."""
        return policy_name(self.config.memory)

    def to_dict(self) -> dict[str, Any]:
        """The part `memory` of `burst plan --json`; bytes are of one rank, host_capacity_bytes of a node."""
        best = self.best.to_dict()
        return {
            **best,
            **self.capacity.to_dict(),
            "fits": self.fit.fits,
            "headroom_bytes": self.fit.headroom_bytes,
            "by": "closed_form" if self.prediction is None else "fake_step",
            "policy": self.policy,
            "reason": self.choice.reason,
            "closed_form": self.estimate.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.choice.candidates],
            "advice": list(self.advice),
        }


def report_memory(
    choice: MemoryChoice, world: Topology, capacity: Capacity, machine: Machine | None, predict: Predict | None
) -> MemoryReport:
    """The report of a settled configuration on the ranks of `world`; `predict` None: in closed form only."""
    config = choice.config
    estimate = estimate_on(config, world)
    known = next((c.prediction for c in choice.candidates if c.memory == config.memory and c.prediction), None)
    prediction = known or (predict(config, world) if predict else None)
    fit = fit_of(prediction or estimate, capacity)
    advice: tuple[str, ...] = ()
    if not fit.fits:
        advice = choice.advice or tuple(advice_for(config, world, capacity, machine))
    return MemoryReport(config, capacity, estimate, prediction, fit, choice, advice)


def exact_prediction(say: Callable[[str], None]) -> Predict | None:
    """Rehearses the engine's step in a process of its own, and says that it begins; None without torch."""
    if importlib.util.find_spec("torch") is None:
        say("torch is not installed here, so memory is given in closed form only, about a tenth off")
        return None

    def predict(config: RunConfig, world: Topology) -> Prediction:
        memory = config.memory.activation_checkpoint
        say(
            f"rehearsing a step under {memory} as one of {world.size} ranks, which may take a minute "
            "(--memory-by closed-form: formulas only)"
        )
        return predict_apart(config, world)

    return predict


def memory_view(report: MemoryReport) -> list[RenderableType]:
    """Components, the peak as a bar, whether it fits, what it was chosen from."""
    parts: list[RenderableType] = [_components_table(report), _bar(report), _verdict(report)]
    parts += [Text.assemble(("  • ", "yellow"), text) for text in report.advice]
    if report.choice.candidates:
        parts += [Text(), _candidates_table(report.choice), _candidates_note(report.choice)]
    return parts


def _components_table(report: MemoryReport) -> Table:
    """A row per component: on the device and on the host, exact beside closed form."""
    sources: list[tuple[str, Prediction]] = [] if report.prediction is None else [("predicted", report.prediction)]
    sources.append(("closed form", report.estimate))
    places = ["device", "host"] if any(source.host_peak_bytes for _, source in sources) else ["device"]
    headings = [f"{place}, {name}" for place in places for name, _ in sources]
    table = Table("memory of a rank", *headings, header_style="bold", padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for component in report.estimate.components["device"]:
        sizes = [source.components[place].get(component, 0) for place in places for _, source in sources]
        if any(sizes):
            table.add_row(component, *(binary_bytes(size) if size else "" for size in sizes))
    table.columns[0].footer = "peak"
    table.add_section()
    peaks = [getattr(source, f"{place}_peak_bytes") for place in places for _, source in sources]
    table.add_row("peak", *map(binary_bytes, peaks), style="bold")
    phases = [source.phase if place == "device" else "" for place in places for _, source in sources]
    table.add_row("in phase", *phases, style="dim")
    return table


def _bar(report: MemoryReport) -> Text:
    """The peak by component against the capacity; every character is a sixtieth of the larger of the two."""
    best, capacity = report.best, report.capacity.device_bytes
    whole = max(best.needed_bytes, capacity)
    sizes = {**best.components["device"], "reserve": best.needed_bytes - best.device_peak_bytes}
    bar, legend = Text("[", style="bold"), Text("             ")
    drawn = done = 0
    for (name, size), color in zip(sizes.items(), (*_BAR_COLORS, "bright_black"), strict=False):
        done += size
        width = round(_BAR_WIDTH * done / whole) - drawn
        drawn += width
        if width > 0:
            bar.append("█" * width, style=color)
            legend.append("■ ", style=color).append(f"{name}  ")
    edge = round(_BAR_WIDTH * capacity / whole)
    free = max(0, edge - drawn)
    bar.append("·" * free).append("]", style="bold")
    if edge < drawn:
        bar.append(f" capacity ends at {edge} of {drawn}", style="red")
    return Text.assemble(("device       ", "bold"), bar, "\n", legend)


def _verdict(report: MemoryReport) -> Text:
    best, capacity, fit = report.best, report.capacity, report.fit
    needs = f"{binary_bytes(best.needed_bytes)} of {binary_bytes(capacity.device_bytes)} on {capacity.device_name}"
    if not capacity.host_is_device and best.needed_bytes > best.device_peak_bytes:
        reserve = binary_bytes(best.needed_bytes - best.device_peak_bytes)
        needs += f" ({reserve} of it context, communicators and fragmentation)"
    if best.host_peak_bytes and not capacity.host_is_device:
        has = (
            "an unknown amount" if capacity.host_bytes_per_node is None else binary_bytes(capacity.host_bytes_per_node)
        )
        needs += f", {binary_bytes(best.host_peak_bytes * capacity.local_ranks)} of {has} of host memory per node"
    by = "predicted by a rehearsal of the step" if report.prediction else "in closed form, about a tenth off"
    room = binary_bytes(abs(fit.headroom_bytes))
    if fit.fits:
        head = ("fits         ", "bold green")
        tail = f"; {room} stay free"
    else:
        where = "the device" if not fit.device else "host memory"
        head = ("does not fit ", "bold red")
        tail = f"; {room} per rank are missing in {where}"
    return Text.assemble(head, f"{report.policy}: {needs}{tail}; {by}")


def _candidates_table(choice: MemoryChoice) -> Table:
    headings = ("device", "host", "kept per rank", "moved per step", "FLOPs again: linear", "attention", "extra time")
    table = Table("memory=auto, best first", "fits", *headings, header_style="bold", padding=(0, 1))
    for column in table.columns[2:]:
        column.justify = "right"
    for candidate in choice.candidates[:_SHOWN_CANDIDATES]:
        table.add_row(*_candidate_cells(candidate), style="bold" if candidate.memory == choice.config.memory else None)
    return table


def _candidate_cells(candidate: MemoryCandidate) -> tuple[str, ...]:
    best, cost = candidate.prediction or candidate.estimate, candidate.cost
    return (
        candidate.name,
        "yes" if candidate.fits else f"no, {binary_bytes(-candidate.fit.headroom_bytes)} short",
        binary_bytes(best.needed_bytes),
        binary_bytes(best.host_peak_bytes) if best.host_peak_bytes else "",
        binary_bytes(cost.kept_bytes),
        binary_bytes(cost.moved_bytes) if cost.moved_bytes else "",
        count(cost.linear_flops) if cost.linear_flops else "",
        count(cost.attention_flops) if cost.attention_flops else "",
        seconds(candidate.extra_s),
    )


def _candidates_note(choice: MemoryChoice) -> Text:
    hidden = len(choice.candidates) - _SHOWN_CANDIDATES
    more = f" {hidden} more in --json." if hidden > 0 else ""
    return Text(
        f"{choice.reason}. Candidates must fit in closed form with {MARGIN:.0%} to spare.{more}",
        style="dim",
    )
