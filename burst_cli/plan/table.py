"""Plans as people read them: the answer in six lines, the details. Pure: plans in, text out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.figures import binary_bytes, count, count_of, percent, seconds
from burst_cli.plan.candidates import Plan
from burst_cli.plan.memory_check import MemoryCheck
from burst_cli.render import told
from burst_cli.tables import listing, styled
from engine.config.settings import Store
from engine.planning.memory.auto import MemoryCandidate
from engine.planning.memory.policy import policy_name
from engine.planning.memory.predictor import MemoryChoice, MemoryPrediction
from engine.planning.methods.presets import AttentionMethod
from engine.planning.methods.preview import LayerPreview, PassPreview
from engine.planning.time.flops import StepTime
from engine.planning.time.machine import Machine
from engine.planning.time.recommend import LEAST_SAVING

_SHOWN_CANDIDATES = 12
_BYTES_NOTE = (
    "Bytes are those of the busiest rank, from the plan that would run. Seconds come from a model of the machine."
)


def answer_view(plan: Plan, price: float | None = None, picture: Path | None = None) -> RenderableType:
    """What a run is decided by: does it fit, how fast, what does it cost, what would help."""
    step, world = plan.step, plan.world
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    what = f"{plan.config.exp}, attention={plan.config.attention.preset}: {plan.config.train.seq_len:,} tokens on "
    lines = [
        ("plan", f"{what}{count_of('rank', world.size)}{nodes}{_as_measured(plan)}"),
        ("memory", _fit_words(plan.memory)),
        ("step", _step_words(step)),
        ("speed", _speed_words(step)),
        ("run", _run_words(plan, price)),
    ]
    lines += [("advice", text) for text in _advice(plan)]
    lines += [] if picture is None else [("picture", str(picture))]
    return Text("\n").join(Text.assemble((f"{name:8}", "bold"), text) for name, text in lines)


def _fit_words(memory: MemoryCheck | None) -> str:
    if memory is None or memory.fit is None:
        return "not predicted"
    room, place = binary_bytes(abs(memory.fit.headroom_bytes)), "host memory" if memory.fit.device else "the device"
    verdict, rest = ("fits", "free") if memory.fits else ("DOES NOT FIT", f"per rank are missing in {place}")
    return f"{verdict}: {memory.needs}, {room} {rest}; memory: {memory.policy}"


def _step_words(step: StepTime) -> str:
    """Seconds, and the parts that matter."""
    attention, others = 0.0, dict[str, float]()
    for name, value in asdict(step.parts).items():
        if name.startswith("attention_") and name != "attention_exposed":
            attention += value
        else:
            others[name.replace("attention_", "").replace("_", " ")] = value
    parts = sorted({"attention": attention, **others}.items(), key=lambda part: -part[1])
    shown = [f"{name} {percent(value / step.seconds)}" for name, value in parts if value >= 0.005 * step.seconds]
    return f"{seconds(step.seconds)} on {step.machine}: {', '.join(shown)}"


def _speed_words(step: StepTime) -> str:
    words = f"{count(step.tokens_per_s_per_device)} tokens/s per device"
    if step.peak_flops_per_s is None:
        return f"{words}; MFU unknown: set train.peak_flops_per_device"
    model, full, hardware = (
        percent(step.mfu(flops)) for flops in (step.flops.model, step.flops.model_full_attention, step.flops.hardware)
    )
    return f"{words}, MFU {model} causal-aware ({full} as if nothing were masked; HFU {hardware})"


def _run_words(plan: Plan, price: float | None) -> str:
    run = plan.run_to_dict(price)
    cost = "" if price is None else f", {run['cost']:,.2f} at {price:g} each"
    length = f"{run['steps']:,} steps, {count(run['tokens'])} tokens: {_long_time(run['hours'])}"
    return f"{length}, {run['device_hours']:.3g} {_unit(plan)}{cost}"


def _long_time(hours: float) -> str:
    return (
        f"{hours:.3g} hours"
        if hours >= 1
        else f"{60 * hours:.3g} minutes"
        if hours >= 1 / 60
        else seconds(3600 * hours)
    )


def _unit(plan: Plan) -> str:
    return "rank-hours" if plan.machine.is_cpu else "GPU-hours"


def _advice(plan: Plan) -> list[str]:
    """One sentence; none where nobody looked."""
    if plan.memory is None:
        return []
    if not plan.memory.fits:
        return list(plan.memory.advice[:1])
    unit = _unit(plan)
    if plan.advice is None:
        return [f"no other method or policy, nor half or twice the ranks, saves {LEAST_SAVING:.0%} of the {unit}"]
    found = plan.advice
    return [f"{found.change} saves {percent(found.saving)} of the {unit}: {seconds(found.step.seconds)} a step"]


def details_view(plan: Plan) -> RenderableType:
    """Behind the answer: the method, every pass, memory, what was chosen from, the FLOPs."""
    preview = plan.preview
    parts: list[RenderableType] = [*_headings(plan), Text()]
    for layer in preview.layers:
        if len(preview.layers) > 1:
            others = f" and {layer.count - 1} like it" if layer.count > 1 else ""
            parts.append(Text(f"layer {layer.first}{others}", style="bold"))
        parts += [_passes_table(layer, plan.machine), Text()]
    if plan.ranking:
        parts += [_ranking_table(plan), Text(), *_presets_view(plan), Text()]
    if plan.memory is not None:
        parts += [*memory_view(plan.memory), Text()]
    return Group(*parts, *_footer(plan))


def _headings(candidate: Plan) -> list[Text]:
    method = candidate.preview.method
    heading = f"layout {method.layout}, {_degrees(method)} (heads x inner ring x outer ring)"
    return [
        _placement(candidate),
        Text.assemble(("method      ", "bold"), heading),
        Text.assemble(("backward    ", "bold"), f"{method.backward_circulates} circulates; {method.reason}"),
    ]


def _placement(candidate: Plan) -> Text:
    topology, train = candidate.group, candidate.config.train
    where = f"{count_of('rank', topology.size)} on {count_of('node', topology.nodes)}"
    groups = candidate.world.size // topology.size
    times = f", {groups} such groups" if groups > 1 else ""
    what = f"{train.seq_len:,} tokens on {where}{times}{_as_measured(candidate)}; {train.compute_dtype}"
    return Text.assemble(("sequence    ", "bold"), what)


def _as_measured(plan: Plan) -> str:
    return " (as many per node as the profile was measured with)" if plan.as_measured else ""


def _link(name: str) -> Callable[[PassPreview], str]:
    return lambda one: binary_bytes(getattr(one.busiest_links, name))


def _extra_buffers(where: Store) -> Callable[[PassPreview], str]:
    return lambda one: binary_bytes(max(rank.buffer_bytes(where, pinned=False) for rank in one.ranks))


def exposed_words(one: PassPreview) -> str:
    """Seconds that communication adds, and their share of the pass."""
    if one.timeline.total_s == 0:
        return seconds(None)
    exposed = one.timeline.exposed_s
    return f"{seconds(exposed)} ({percent(exposed / one.timeline.total_s)})" if exposed > 0 else "0"


_FIGURES: tuple[tuple[str, Callable[[PassPreview], str]], ...] = (
    ("steps", lambda one: str(one.steps)),
    ("tiles", lambda one: str(one.tiles)),
    ("visible pairs, all ranks", lambda one: count(one.visible_pairs)),
    ("balance (busiest rank / mean)", lambda one: f"{one.balance:.3f}"),
    ("sent inside the node", _link("intra_bytes")),
    ("sent between nodes", _link("inter_bytes")),
    ("moved to and from host memory", _link("host_bytes")),
    ("buffers on the device", _extra_buffers("device")),
    ("buffers in host memory", _extra_buffers("host")),
    ("predicted seconds", lambda one: seconds(one.timeline.total_s)),
    ("  computing (busiest rank)", lambda one: seconds(one.timeline.busiest_s)),
    ("  exposed communication", exposed_words),
)


def _passes_table(layer: LayerPreview, machine: Machine) -> Table:
    directions = [one.direction for one in layer.passes]
    rows = [[name, *map(cell, layer.passes)] for name, cell in _FIGURES]
    return listing((f"per layer and rank ({machine.name})", *directions), rows, directions, ruled=True)


def _ranking_table(candidate: Plan) -> Table:
    """What attention=auto chose from, best first."""
    rows = []
    for one in candidate.ranking:
        method = one.method
        moved = method.backward_circulates if method.ring_inner_size * method.ring_outer_size > 1 else "-"
        figures = (seconds(one.seconds), seconds(one.exposed_s), binary_bytes(one.buffer_bytes))
        rows.append((method.preset, _degrees(method), moved, *figures))
    headings = ("attention per step", "exposed", "buffers")
    about = ("methods, best first", "heads x inner x outer", "backward")
    return listing((*about, *headings), [styled(rows[0], "bold"), *rows[1:]], headings, ruled=True)


def _presets_view(plan: Plan) -> list[RenderableType]:
    """All presets side by side, the fastest first, then those that are not legal, with the reason."""
    legal = sorted((one for one in plan.presets if one.step_s is not None), key=lambda one: one.step_s or 0.0)
    rows = [
        (
            one.preset,
            seconds(one.step_s),
            binary_bytes(one.needed_bytes) + ("" if one.fits is not False else ", too much"),
        )
        for one in legal
    ]
    policy = f"all presets, memory: {policy_name(plan.config.memory)}"
    figures = ("step", "memory of a rank")
    illegal = [
        Text.assemble((f"{one.preset}: ", "bold"), ("not legal here: ", "yellow"), "; ".join(one.problems))
        for one in plan.presets
        if one.problems
    ]
    return [listing((policy, *figures), rows, figures, ruled=True), *illegal]


def _footer(candidate: Plan) -> list[Text]:
    preview, step = candidate.preview, candidate.step
    lines = [told("warning", text) for text in preview.warnings]
    if candidate.config.attention.documents:
        text = "packed documents depend on the data: planned as one sequence, the most work that a batch can be"
        lines.append(told("note", text))
    if len(preview.planned_ranks) < candidate.group.size:
        text = (
            f"pairs and balance are of all {candidate.group.size} ranks; steps, tiles, bytes, buffers and seconds are "
            f"the largest of ranks {', '.join(map(str, preview.planned_ranks))}, whose plans were made"
        )
        lines.append(told("note", text))
    parts = [f"{name.replace('_', ' ')} {seconds(value)}" for name, value in asdict(step.parts).items() if value]
    flops = f"model {count(step.flops.model)}, hardware {count(step.flops.hardware)}, as if nothing were masked "
    return [
        *lines,
        Text.assemble(("step        ", "bold"), f"{seconds(step.seconds)}: {', '.join(parts)}"),
        Text.assemble(("FLOPs/step  ", "bold"), flops + count(step.flops.model_full_attention)),
        Text(_BYTES_NOTE, style="dim"),
    ]


def _degrees(method: AttentionMethod) -> str:
    return f"{method.head_parallel_size} x {method.ring_inner_size} x {method.ring_outer_size}"


def memory_view(memory: MemoryCheck) -> list[RenderableType]:
    """Components, what would make it fit, what it was chosen from."""
    parts: list[RenderableType] = [] if memory.prediction is None else [_components_table(memory.prediction)]
    parts += [Text.assemble(("  • ", "yellow"), text) for text in memory.advice]
    if memory.choice.candidates:
        parts += [Text(), candidates_table(memory.choice), _candidates_note(memory.choice)]
    return parts


def _components_table(found: MemoryPrediction) -> Table:
    """A row per component: on the device and on the host."""
    peaks = {"device": found.device_peak_bytes, "host": found.host_peak_bytes}
    places = [place for place, peak in peaks.items() if peak or place == "device"]
    sizes = {name: [found.components[place].get(name, 0) for place in places] for name in found.components["device"]}
    rows = [[name, *(binary_bytes(size) if size else "" for size in row)] for name, row in sizes.items() if any(row)]
    table = listing(("memory of a rank", *places), rows, places, ruled=True)
    table.add_section()
    table.add_row("peak", *(binary_bytes(peaks[place]) for place in places), style="bold")
    table.add_row("in phase", found.phase, style="dim")
    if found.reserve_bytes:
        table.add_row("context, communicators, fragmentation", binary_bytes(found.reserve_bytes))
    return table


def candidates_table(choice: MemoryChoice) -> Table:
    """What memory=auto chose from: bytes of one rank, of those that were predicted; seconds that a policy adds."""
    headings = ("device", "host", "kept", "moved", "FLOPs again", "step")
    rows = [
        styled(_candidate_cells(one), "bold" if one.memory == choice.config.memory else "")
        for one in choice.candidates[:_SHOWN_CANDIDATES]
    ]
    return listing(("memory=auto, best first", "fits", *headings), rows, headings)


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
        count(again) if (again := cost.linear_flops + cost.attention_flops) else "",
        seconds(candidate.step_s) if candidate.step_s else "",
    )


def _candidates_note(choice: MemoryChoice) -> Text:
    hidden = len(choice.candidates) - _SHOWN_CANDIDATES
    more = f" {hidden} more in --json." if hidden > 0 else ""
    return Text(
        f"{choice.reason}. Kept and moved: of a rank, per step. Not tried: slower ones, and those that keep too much "
        f"for the memory there is.{more}",
        style="dim",
    )
