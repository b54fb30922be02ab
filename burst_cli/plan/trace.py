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
    """The passes of layer 0 on one rank. Raises ConfigError for a rank that is not there."""
    size = plan.group.size
    if rank >= size:
        raise ConfigError(f"--trace: got rank {rank}, but {size} ranks share a sequence: expected 0 to {size - 1}")
    layers = attention_layers(plan.config, plan.run.method)
    blocks = divide_run(plan.config, plan.run.method, layers)
    first = layers[0]
    return trace_method(first.method, first.mask, blocks, rank, recompute_before=first.recompute_before)


def trace_to_dict(rank: int, trace: Trace) -> dict[str, Any]:
    """Plain values for JSON."""
    passes = {name: [{"step": step.step, "ops": list(step.ops)} for step in steps] for name, steps in trace.items()}
    return {"rank": rank, "layer": 0, "passes": passes}


def trace_view(plan: Plan, rank: int, trace: Trace) -> Text:
    """The passes one after another, under a line that says what they are of."""
    what = f"{plan.run.method.preset}, layer 0, rank {rank} of {plan.group.size} on {plan.group.nodes} nodes"
    legend = "kv2[0:4]: rows 0 to 3 of the k and v that ring rank 2 owns"
    parts = [f"{name}\n{trace_text(steps) or 'nothing'}" for name, steps in trace.items()]
    return Text("\n\n".join([f"{what} ({legend})", *parts]), no_wrap=True, overflow="ignore")
