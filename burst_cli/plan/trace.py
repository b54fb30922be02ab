"""`burst plan --trace`: what one rank does in attention, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from burst_cli.plan.candidates import Plan
from engine.config.errors import ConfigError
from engine.planning.methods.blocks import divide_run
from engine.planning.methods.layers import attention_layers
from engine.planning.program.trace import TraceStep, trace_text
from engine.planning.schedules.plan import PassName, trace_method

Trace = Mapping[PassName, Sequence[TraceStep]]


def trace_rank(plan: Plan, rank: int) -> Trace:
    """The passes of the first layer with attention on one rank. Raises ConfigError for a rank that is not there."""
    size = plan.group.size
    if rank >= size:
        raise ConfigError(f"--trace: got rank {rank}, but {size} ranks share a sequence: expected 0 to {size - 1}")
    layers = attention_layers(plan.config, plan.run.method)
    blocks = divide_run(plan.config, plan.run.method, layers)
    first = layers[_traced_layer(plan)]
    return trace_method(first.method, first.mask, blocks, rank, recompute_before=first.recompute_before)


def _traced_layer(plan: Plan) -> int:
    """The first layer with attention."""
    return next(i for i, layer in enumerate(attention_layers(plan.config, plan.run.method)) if layer.attends)


def trace_to_dict(plan: Plan, rank: int, trace: Trace) -> dict[str, Any]:
    """Plain values for JSON."""
    passes = {
        name: [{"step": step.step, "ops": [" ".join(op.split()) for op in step.ops]} for step in steps]
        for name, steps in trace.items()
    }
    group = {"ranks": plan.group.size, "nodes": plan.group.nodes}
    return {"preset": plan.run.method.preset, **group, "rank": rank, "layer": _traced_layer(plan), "passes": passes}


def trace_view(plan: Plan, rank: int, trace: Trace) -> Text:
    """The passes one after another, under lines that say what they are of."""
    method, group = plan.run.method, plan.group
    nodes = "one node" if group.nodes == 1 else f"{group.nodes} nodes"
    moves = "" if group.size == 1 else f", backward moves {method.backward_circulates}"
    what = f"{method.preset} on {group.size} ranks of {nodes}, layout {method.layout}{moves}: rank {rank}, layer "
    what += str(_traced_layer(plan))
    legend = "kv0[0:4]: k and v of rows 0 to 3 of the block that ring rank 0 owns"
    if method.head_parallel_size > 1:
        legend += f"; kv@{rank}[0:4]: of the rows that rank {rank} holds between the layers"
    passes = [f"{name}\n{_pass_text(name, steps, trace['forward'])}" for name, steps in trace.items()]
    return Text("\n\n".join([f"{what}\n({legend})", *passes]), no_wrap=True, overflow="ignore")


def _pass_text(name: PassName, steps: Sequence[TraceStep], forward: Sequence[TraceStep]) -> str:
    if name == "recompute" and steps is forward:
        return "as forward"
    return trace_text(steps) or "nothing"
