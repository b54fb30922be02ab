"""Plans as people read them: the answer in six lines, the details. Pure: plans in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from burst_cli.plan.candidates import Plan
from burst_cli.plan.memory_check import MemoryCheck
from burst_cli.render import listing, styled, told
from engine.planning.methods.presets import AttentionMethod
from engine.predict.attention import LayerPreview, PassPreview
from engine.predict.flops import StepTime
from engine.predict.machine import Machine
from engine.predict.memory import MemoryPrediction
from engine.resolve.memory import MemoryCandidate
from engine.resolve.recommend import LEAST_SAVING
from engine.runs.figures import binary_bytes, count, count_of, percent, seconds
from engine.runs.record import policy_name

_SHOWN_CANDIDATES = 12
_BYTES_NOTE = (
    "Bytes are those of the busiest rank, from the plan that would run. Seconds come from a model of the machine."
)


def answer_view(plan: Plan, price: float | None = None, picture: Path | None = None) -> RenderableType:
    """What a run is decided by: does it fit, how fast, what does it cost, what would help."""
    world, config = plan.world, plan.config
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    what = f"{config.exp}, attention={config.attention.preset}: {config.train.seq_len:,} tokens on "
    lines = {
        "plan": f"{what}{count_of('rank', world.size)}{nodes}{_as_measured(plan)}",
        "memory": _fit_words(plan.memory),
        "step": _step_words(plan.step) if plan.fits else None,
        "speed": _speed_words(plan.step) if plan.fits else None,
        "run": _run_words(plan, price) if plan.fits else None,
        "advice": _advice(plan),
        "picture": None if picture is None else str(picture),
    }
    facts = [_fact(name, text, 8) for name, text in lines.items() if text is not None]
    return Text("\n").join([*facts, *_remedies(plan)])


def _remedies(plan: Plan) -> Iterator[Text]:
    """What would make it fit, one line each, all searched for and predicted."""
    if plan.memory is None or plan.fits:
        return
    none = "nothing that was tried does: other policies, host memory, up to 16 times the ranks or fewer tokens"
    for index, text in enumerate(plan.memory.advice or (none,)):
        yield _fact("to fit" if index == 0 else "", text, 8)


def _fact(name: str, text: str, width: int = 12) -> Text:
    return Text.assemble((f"{name:{width}}", "bold"), text)


def _fit_words(memory: MemoryCheck | None) -> str:
    if memory is None or memory.fit is None:
        return "not predicted"
    room, place = binary_bytes(abs(memory.fit.headroom_bytes)), "host memory" if memory.fit.device else "the device"
    verdict, rest = ("fits", "free") if memory.fits else ("DOES NOT FIT", f"per rank are missing in {place}")
    reserve = 0 if memory.prediction is None else memory.prediction.reserve_bytes
    held = f" ({binary_bytes(reserve)} of it reserved for CUDA, NCCL and fragmentation)" if reserve else ""
    return f"{verdict}: {memory.needs}{held}, {room} {rest}; memory: {memory.policy}"


def _step_words(step: StepTime) -> str:
    """Seconds, and the parts that matter."""
    parts = {"attention": 0.0}
    for name, value in asdict(step.parts).items():
        words = name.replace("attention_exposed", "exposed").replace("_", " ")
        own = "attention" if words.startswith("attention") else words
        parts[own] = parts.get(own, 0.0) + value
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shown = [f"{name} {percent(value / step.seconds)}" for name, value in ordered if value >= 0.005 * step.seconds]
    return f"{seconds(step.seconds)} on {step.machine}: {', '.join(shown)}"


def _speed_words(step: StepTime) -> str:
    words = f"{count(step.tokens_per_s_per_device)} tokens/s per device"
    if step.peak_flops_per_s is None:
        return f"{words}; MFU unknown: set train.peak_flops_per_device"
    flops = step.flops
    model, full, hardware = (percent(step.mfu(f)) for f in (flops.model, flops.model_full_attention, flops.hardware))
    return f"{words}, MFU {model} causal-aware ({full} as if nothing were masked; HFU {hardware})"


def _run_words(plan: Plan, price: float | None) -> str:
    run = plan.run_to_dict(price)
    hours: float = run["hours"]
    time = f"{hours:.3g} hours" if hours >= 1 else f"{60 * hours:.3g} minutes"
    time = time if hours >= 1 / 60 else seconds(3600 * hours)
    cost = "" if price is None else f", {run['cost']:,.2f} at {price:g} each"
    length = f"{run['steps']:,} steps, {count(run['tokens'])} tokens: {time}"
    return f"{length}, {run['device_hours']:.3g} {_unit(plan)}{cost}"


def _unit(plan: Plan) -> str:
    return "rank-hours" if plan.machine.is_cpu else "GPU-hours"


def _as_measured(plan: Plan) -> str:
    return " (as many per node as the profile was measured with)" if plan.as_measured else ""


def _advice(plan: Plan) -> str | None:
    """One sentence; None where nobody looked."""
    unit, found = _unit(plan), plan.advice
    if plan.memory is None:
        return None
    if not plan.memory.fits:
        return None
    if found is None:
        tried = "methods, memory policies and numbers of ranks (half, twice) tried"
        return f"this is already the cheapest of the {tried}: none saves {LEAST_SAVING:.0%} of the {unit}"
    return f"{found.change} saves {percent(found.saving)} of the {unit}: {seconds(found.step.seconds)} a step"


# --- details ----------------------------------------------------------------------------------------------------------


def details_view(plan: Plan) -> RenderableType:
    """Behind the answer: the method, every pass, memory, what was chosen from, the FLOPs."""
    return Group(*_headings(plan), *_tables(plan), *_footer(plan))


def _headings(plan: Plan) -> Iterator[Text]:
    topology, train, method = plan.group, plan.config.train, plan.preview.method
    groups = plan.world.size // topology.size
    where = f"{count_of('rank', topology.size)} on {count_of('node', topology.nodes)}"
    where += f", {groups} such groups" if groups > 1 else ""
    yield _fact("sequence", f"{train.seq_len:,} tokens on {where}{_as_measured(plan)}; {train.compute_dtype}")
    yield _fact("method", f"layout {method.layout}, {_degrees(method)} (heads x inner ring x outer ring)")
    yield _fact("backward", f"{method.backward_circulates} circulates; {plan.moving_operand}")
    yield Text()


def _tables(plan: Plan) -> Iterator[RenderableType]:
    layers = plan.preview.layers
    for layer in layers:
        if len(layers) > 1:
            others = f" and {layer.count - 1} like it" if layer.count > 1 else ""
            yield Text(f"layer {layer.first}{others}", style="bold")
        yield from (_passes_table(layer, plan.machine), Text())
    if plan.ranking:
        yield from (_ranking_table(plan), Text(), *_presets_view(plan), Text())
    if plan.memory is not None:
        yield from (*_memory_view(plan.memory), Text())


def _footer(plan: Plan) -> Iterator[Text]:
    preview, step = plan.preview, plan.step
    yield from (told("warning", text) for text in preview.warnings)
    if plan.config.attention.documents:
        text = "packed documents depend on the data: planned as one sequence, the most work that a batch can be"
        yield told("note", text)
    if len(preview.planned_ranks) < plan.group.size:
        text = (
            f"pairs and balance are of all {plan.group.size} ranks; steps, tiles, bytes, buffers and seconds are "
            f"the largest of ranks {', '.join(map(str, preview.planned_ranks))}, whose plans were made"
        )
        yield told("note", text)
    parts = [f"{name.replace('_', ' ')} {seconds(value)}" for name, value in asdict(step.parts).items() if value]
    yield _fact("step", f"{seconds(step.seconds)}: {', '.join(parts)}")
    model, hardware, full = map(count, (step.flops.model, step.flops.hardware, step.flops.model_full_attention))
    yield _fact("FLOPs/step", f"model {model}, hardware {hardware}, as if nothing were masked {full}")
    yield Text(_BYTES_NOTE, style="dim")


def exposed_words(one: PassPreview) -> str:
    """Seconds that communication adds, and their share of the pass."""
    exposed, total = one.timeline.exposed_s, one.timeline.total_s
    if total == 0:
        return seconds(None)
    return f"{seconds(exposed)} ({percent(exposed / total)})" if exposed > 0 else "0"


def _buffers(one: PassPreview, where: str) -> str:
    return binary_bytes(max(rank.buffer_bytes(where, is_argument=False) for rank in one.ranks))  # type: ignore[arg-type]


_FIGURES: dict[str, Callable[[PassPreview], str]] = {
    "steps": lambda one: str(one.steps),
    "tiles": lambda one: str(one.tiles),
    "visible pairs, all ranks": lambda one: count(one.visible_pairs),
    "balance (busiest rank / mean)": lambda one: f"{one.balance:.3f}",
    "sent inside the node": lambda one: binary_bytes(one.busiest_links.intra_bytes),
    "sent between nodes": lambda one: binary_bytes(one.busiest_links.inter_bytes),
    "moved to and from host memory": lambda one: binary_bytes(one.busiest_links.host_bytes),
    "buffers on the device": lambda one: _buffers(one, "device"),
    "buffers in host memory": lambda one: _buffers(one, "host"),
    "predicted seconds": lambda one: seconds(one.timeline.total_s),
    "  computing (busiest rank)": lambda one: seconds(one.timeline.busiest_s),
    "  exposed communication": exposed_words,
}


def _passes_table(layer: LayerPreview, machine: Machine) -> Table:
    directions = [one.direction for one in layer.passes]
    rows = [[name, *map(cell, layer.passes)] for name, cell in _FIGURES.items()]
    return listing((f"per layer and rank ({machine.name})", *directions), rows, directions, ruled=True)


def _degrees(method: AttentionMethod) -> str:
    return f"{method.head_parallel_size} x {method.ring_inner_size} x {method.ring_outer_size}"


def _ranking_table(plan: Plan) -> Table:
    """What attention=auto chose from, best first."""
    rows = []
    for one in plan.ranking:
        method = one.method
        moved = method.backward_circulates if method.ring_inner_size * method.ring_outer_size > 1 else "-"
        figures = (seconds(one.seconds), seconds(one.exposed_s), binary_bytes(one.buffer_bytes))
        rows.append((method.preset, _degrees(method), moved, *figures))
    headings = ("attention per step", "exposed", "buffers")
    about = ("methods, best first", "heads x inner x outer", "backward")
    return listing((*about, *headings), [styled(rows[0], "bold"), *rows[1:]], headings, ruled=True)


def _presets_view(plan: Plan) -> Iterator[RenderableType]:
    """All presets side by side, the fastest first, then those that are not legal, with the reason."""
    legal = sorted((one for one in plan.presets if one.step_s is not None), key=lambda one: one.step_s or 0.0)
    rows = []
    for one in legal:
        too_much = ", too much" if one.fits is False else ""
        rows.append((one.preset, seconds(one.step_s), binary_bytes(one.needed_bytes) + too_much))
    figures = ("step", "memory of a rank")
    yield listing((f"all presets, memory: {policy_name(plan.config.memory)}", *figures), rows, figures, ruled=True)
    for one in plan.presets:
        if one.problems:
            yield Text.assemble((f"{one.preset}: ", "bold"), ("not legal here: ", "yellow"), "; ".join(one.problems))


def _memory_view(memory: MemoryCheck) -> Iterator[RenderableType]:
    """Components, what would make it fit, what it was chosen from."""
    if memory.prediction is not None:
        yield _components_table(memory.prediction)
    if memory.decision.candidates:
        yield from (Text(), candidates_table(memory), _candidates_note(memory))


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


def candidates_table(memory: MemoryCheck) -> Table:
    """What memory=auto chose from: bytes of one rank, of those that were predicted; seconds that a policy adds."""
    headings = ("device", "host", "kept", "moved", "FLOPs again", "step")
    rows = [
        styled(_candidate_cells(one), "bold" if one.memory == memory.config.memory else "")
        for one in memory.decision.candidates[:_SHOWN_CANDIDATES]
    ]
    return listing(("memory=auto, best first", "fits", *headings), rows, headings)


def _candidate_cells(one: MemoryCandidate) -> tuple[str, ...]:
    found, fit, cost = one.prediction, one.fit, one.cost
    fits = "not tried" if fit is None else "yes" if fit.fits else f"no, {binary_bytes(-fit.headroom_bytes)} short"
    return (
        one.name,
        fits,
        binary_bytes(found.needed_bytes) if found else "",
        binary_bytes(found.host_peak_bytes) if found and found.host_peak_bytes else "",
        binary_bytes(cost.saved_bytes),
        binary_bytes(cost.moved_bytes) if cost.moved_bytes else "",
        count(again) if (again := cost.linear_flops + cost.attention_flops) else "",
        seconds(one.step_s) if one.step_s else "",
    )


def _candidates_note(memory: MemoryCheck) -> Text:
    hidden = len(memory.decision.candidates) - _SHOWN_CANDIDATES
    more = f" {hidden} more in --json." if hidden > 0 else ""
    return Text(
        f"{memory.reason}. Kept and moved: of a rank, per step. Not tried: slower ones, and those that keep too much "
        f"for the memory there is.{more}",
        style="dim",
    )
