"""The checks catch broken plans: what falsifies float64 numbers is found by counting, at least 99 times in 100.

The judge is numerical and independent of the counting records: a mutant is a real fault when the executor raises or the
float64 result differs from dense attention, under the late or the eager transport, with all buffers poisoned.
"""

from __future__ import annotations

from typing import Literal

import torch
from attention_oracle import causal, gather, oracle, random_inputs
from plan_mutations import mutants

from engine.attention.counting import prove_plan
from engine.attention.executor import lockstep
from engine.attention.kernels.reference import ReferenceKernel
from engine.attention.layout import Layout, build_layout
from engine.attention.mask import Mask, Visibility
from engine.attention.plan import AttentionPlan
from engine.attention.planners.ring import Ring, plan_backward, plan_forward
from engine.attention.runtime import AttentionRuntime, SavedAttention
from engine.attention.transport import Hub

MUTANTS_PER_PLAN = 100
CASES: list[tuple[str, Ring, Literal["zigzag", "striped"]]] = [
    ("forward", Ring(3), "zigzag"),
    ("kv", Ring(3), "zigzag"),
    ("q", Ring(3), "striped"),
    ("forward", Ring(2, 2), "striped"),
    ("kv", Ring(2, 2), "zigzag"),
    ("q", Ring(2, 2, 1), "zigzag"),
    ("q", Ring(2, 3), "zigzag"),
]


class Judge:
    """Whether a plan computes the right numbers."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.inputs = random_inputs(layout.seq_len, 2, 1, head_dim=4)
        self.want = oracle(self.inputs, causal(layout.seq_len))
        self.index = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.size)]

    def accepts(self, plan: AttentionPlan, *, late: bool) -> bool:
        try:
            got = self._run(plan, late)
        except Exception:  # any failure of a broken plan is a fault made visible
            return False
        return all(bool(((got[name] - self.want[name]).abs() < 1e-10).all()) for name in got)

    def _run(self, plan: AttentionPlan, late: bool) -> dict[str, torch.Tensor]:
        hub = Hub(plan.size, late=late)
        executions = []
        for rank, i in enumerate(self.index):
            rank_plan = plan.ranks[rank]
            runtime = AttentionRuntime(rank_plan, rank_plan, ReferenceKernel(), hub.transport(rank), poisoned=True)
            q, k, v = (x[i].clone() for x in (self.inputs.q, self.inputs.k, self.inputs.v))
            if plan.direction == "forward":
                executions.append(runtime.forward_execution(q, k, v))
            else:
                saved = SavedAttention(q, k, v, self.want["out"][i], self.want["lse"][i])
                executions.append(runtime.backward_execution(saved, self.inputs.dout[i].clone()))
        lockstep(executions, hub)
        if plan.direction == "forward":
            acc = [execution.pinned("acc") for execution in executions]
            return {name: gather(self.index, [a[name] for a in acc]) for name in ("out", "lse")}
        dkv = [execution.pinned("dkv")["dkv"] for execution in executions]
        parts = {
            "dq": [e.pinned("dq")["dq"] for e in executions],
            "dk": [x[:, 0] for x in dkv],
            "dv": [x[:, 1] for x in dkv],
        }
        return {name: gather(self.index, tensors) for name, tensors in parts.items()}


def counting_accepts(plan: AttentionPlan, visibility: Visibility) -> bool:
    try:
        prove_plan(plan, visibility, late=True)
        prove_plan(plan, visibility, late=False)
    except Exception:  # a broken plan may break anything
        return False
    return True


def test_counting_finds_what_falsifies_numbers() -> None:
    faults, missed = 0, []
    for seed, (direction, ring, layout_name) in enumerate(CASES):
        layout = build_layout(layout_name, 2 * ring.size + 1, ring.size)
        visibility = Visibility(Mask(layout.seq_len), layout)
        plan = plan_forward(visibility, ring) if direction == "forward" else plan_backward(visibility, ring, direction)  # type: ignore[arg-type]
        judge = Judge(layout)
        assert judge.accepts(plan, late=True)
        assert judge.accepts(plan, late=False)
        assert counting_accepts(plan, visibility)
        for mutant in mutants(plan, MUTANTS_PER_PLAN, seed):
            if judge.accepts(mutant.plan, late=True) and judge.accepts(mutant.plan, late=False):
                continue
            faults += 1
            if counting_accepts(mutant.plan, visibility):
                missed.append(mutant.what)
    assert faults >= 300, faults  # the mutations do break plans
    assert len(missed) <= faults // 100, (len(missed), faults, missed)
