"""Memory of a planned run: what a rank needs beside what there is, and how people read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import binary_bytes, count, seconds
from engine.config.settings import RunConfig
from engine.planning.memory.auto import MemoryCandidate, MemoryChoice, advice_for
from engine.planning.memory.capacity import Capacity
from engine.planning.memory.fit import Fit, predicted_fit
from engine.planning.memory.policy import policy_name
from engine.planning.memory.predictor import MemoryPrediction, Predict
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import Machine

_BAR_WIDTH = 60
_BAR_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "white", "white")
_SHOWN_CANDIDATES = 12


@dataclass(frozen=True)
class MemoryReport:
    """What one rank needs at its worst moment, beside what there is.

    advice   what would make it fit, if it does not
    """

    config: RunConfig
    capacity: Capacity
    prediction: MemoryPrediction
    choice: MemoryChoice
    advice: tuple[str, ...] = ()

    @property
    def fit(self) -> Fit:
        """Of the prediction."""
        return predicted_fit(self.prediction, self.capacity)

    @property
    def policy(self) -> str:
        """The checkpoint policy in words."""
        return policy_name(self.config.memory)

    def to_dict(self) -> dict[str, Any]:
        """The part `memory` of `burst plan --json`; bytes are of one rank, host_capacity_bytes of a node."""
        return {
            **self.prediction.to_dict(),
            **self.capacity.to_dict(),
            "fits": self.fit.fits,
            "headroom_bytes": self.fit.headroom_bytes,
            "by": "fake_step",
            "policy": self.policy,
            "reason": self.choice.reason,
            "candidates": [candidate.to_dict() for candidate in self.choice.candidates],
            "advice": list(self.advice),
        }


def report_memory(
    choice: MemoryChoice, world: Topology, capacity: Capacity, predict: Predict, machine: Machine | None = None
) -> MemoryReport:
    """The report of a settled configuration on the ranks of `world`."""
    config = choice.config
    report = MemoryReport(config, capacity, choice.prediction or predict(config, world), choice)
    if report.fit.fits:
        return report
    return replace(report, advice=choice.advice or tuple(advice_for(config, world, capacity, predict, machine)))


def memory_view(report: MemoryReport) -> list[RenderableType]:
    """Components, the peak as a bar, whether it fits, what it was chosen from."""
    parts: list[RenderableType] = [_components_table(report), _bar(report), _verdict(report)]
    parts += [Text.assemble(("  • ", "yellow"), text) for text in report.advice]
    if report.choice.candidates:
        parts += [Text(), candidates_table(report.choice), _candidates_note(report.choice)]
    return parts


def _components_table(report: MemoryReport) -> Table:
    """A row per component: on the device and on the host."""
    found = report.prediction
    peaks = {"device": found.device_peak_bytes, "host": found.host_peak_bytes}
    places = [place for place, peak in peaks.items() if peak or place == "device"]
    table = Table("memory of a rank", *places, header_style="bold", padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for component in found.components["device"]:
        sizes = [found.components[place].get(component, 0) for place in places]
        if any(sizes):
            table.add_row(component, *(binary_bytes(size) if size else "" for size in sizes))
    table.add_section()
    table.add_row("peak", *(binary_bytes(peaks[place]) for place in places), style="bold")
    table.add_row("in phase", found.phase, style="dim")
    return table


def _bar(report: MemoryReport) -> Text:
    """The peak by component against the capacity; every character is a sixtieth of the larger of the two."""
    best, capacity = report.prediction, report.capacity.device_bytes
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
    best, capacity, fit = report.prediction, report.capacity, report.fit
    needs = f"{binary_bytes(best.needed_bytes)} of {binary_bytes(capacity.device_bytes)} on {capacity.device_name}"
    if not capacity.host_is_device and best.needed_bytes > best.device_peak_bytes:
        reserve = binary_bytes(best.needed_bytes - best.device_peak_bytes)
        needs += f" ({reserve} of it context, communicators and fragmentation)"
    if best.host_peak_bytes and not capacity.host_is_device:
        has = (
            "an unknown amount" if capacity.host_bytes_per_node is None else binary_bytes(capacity.host_bytes_per_node)
        )
        needs += f", {binary_bytes(best.host_peak_bytes * capacity.local_ranks)} of {has} of host memory per node"
    room = binary_bytes(abs(fit.headroom_bytes))
    if fit.fits:
        head = ("fits         ", "bold green")
        tail = f"; {room} stay free"
    else:
        where = "the device" if not fit.device else "host memory"
        head = ("does not fit ", "bold red")
        tail = f"; {room} per rank are missing in {where}"
    return Text.assemble(head, f"{report.policy}: {needs}{tail}; predicted by a rehearsal of the step")


def candidates_table(choice: MemoryChoice) -> Table:
    """What memory=auto chose from: bytes of one rank, of those that were predicted; seconds that a policy adds."""
    headings = ("device", "host", "kept per rank", "moved per step", "FLOPs again: linear", "attention", "step")
    table = Table("memory=auto, best first", "fits", *headings, header_style="bold", padding=(0, 1))
    for column in table.columns[2:]:
        column.justify = "right"
    for candidate in choice.candidates[:_SHOWN_CANDIDATES]:
        table.add_row(*_candidate_cells(candidate), style="bold" if candidate.memory == choice.config.memory else None)
    return table


def _candidate_cells(candidate: MemoryCandidate) -> tuple[str, ...]:
    found, fit, cost = candidate.prediction, candidate.fit, candidate.cost
    fits = "not tried" if fit is None else "yes" if fit.fits else f"no, {binary_bytes(-fit.headroom_bytes)} short"
    return (
        candidate.name,
        fits,
        binary_bytes(found.needed_bytes) if found else "",
        binary_bytes(found.host_peak_bytes) if found and found.host_peak_bytes else "",
        binary_bytes(cost.kept_bytes),
        binary_bytes(cost.moved_bytes) if cost.moved_bytes else "",
        count(cost.linear_flops) if cost.linear_flops else "",
        count(cost.attention_flops) if cost.attention_flops else "",
        seconds(candidate.step_s) if candidate.step_s else "",
    )


def _candidates_note(choice: MemoryChoice) -> Text:
    hidden = len(choice.candidates) - _SHOWN_CANDIDATES
    more = f" {hidden} more in --json." if hidden > 0 else ""
    return Text(
        f"{choice.reason}. Not tried: slower ones, and those that keep too much for the memory there is.{more}",
        style="dim",
    )
