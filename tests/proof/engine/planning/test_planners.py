"""Every planner, for anything that it takes: proven by counting, equal to dense attention, alike for one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.plan_checks import check_plans, same_but_for_step_numbers

from engine.kernels.attention.cpu_flash import CpuFlashKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.blocks import Blocks, divide_sequence
from engine.planning.methods.presets import AttentionMethod
from engine.planning.schedules.plan import PlanPair, plan_method
from engine.planning.visibility.mask import BlockList, Mask

RING_SHAPES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (5, 1), (6, 1), (3, 2), (2, 3), (7, 1), (2, 4)]
SMALL_SHAPES = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2)]
LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "balanced")


@dataclass(frozen=True)
class Case:
    """What a planner was asked for; `plan` plans for all ranks (None) or for one."""

    plan: Callable[[int | None], PlanPair]
    mask: Mask
    blocks: Blocks
    heads: tuple[int, int] = (4, 2)
    before: int | None = None  # where the queries end that are attended again


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    rows = draw(st.integers(1, 24))
    starts = draw(st.sets(st.integers(1, 23), max_size=3))
    documents = (0, *sorted(s for s in starts if s < rows)) if starts else ()
    pairs = draw(st.none() | st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
    blocks = None if pairs is None else BlockList.from_pairs(5, pairs)
    window = draw(st.none() | st.integers(1, rows + 2))
    sink = draw(st.integers(0, 3)) if window else 0
    return Mask(rows, draw(st.booleans()), window, documents, blocks, sink)


@st.composite
def head_counts(draw: st.DrawFn, parallel: int) -> tuple[int, int]:
    """Query and kv heads that so many ranks can divide, kv heads also as copies."""
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n % parallel == 0 or parallel % n == 0]))
    return max(kv_heads, parallel) * draw(st.integers(1, 2)), kv_heads


@st.composite
def methods(draw: st.DrawFn, *, rings: bool = False, chunked: bool = False, cut: bool = False) -> Case:
    """Rings alone or with a head exchange, chunk pipelines and what is attended again."""
    mask, (inner, outer) = draw(masks()), draw(st.sampled_from(RING_SHAPES if rings else SMALL_SHAPES))
    parallel = (
        1 if rings else draw(st.sampled_from([2, 3, 4] if inner * outer < 3 and not chunked and not cut else [1, 2]))
    )
    heads = draw(head_counts(parallel))
    rows = mask.seq_len + draw(st.integers(0, 4))
    before = draw(st.integers(0, rows)) if cut else None
    layout = draw(st.sampled_from([*LAYOUTS, *(["chunk_cyclic"] * chunked), *(["split_zigzag"] * cut)]))
    options = draw(chunk_options() if chunked else ring_options(inner))
    method = AttentionMethod(
        "loongtrain",
        layout,  # type: ignore[arg-type]
        inner,
        outer,
        gradient_wire_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        head_parallel_size=parallel,
        placement=draw(st.sampled_from(["head_first", "context_first", "interleaved"])),
        kv_replicated=parallel > heads[1],
        split_at=draw(st.integers(0, rows)) if layout == "split_zigzag" else 0,
        **options,
    )
    blocks = divide_sequence(method, rows, [mask])
    return Case(
        lambda rank: plan_method(method, mask, blocks, rank, recompute_before=before), mask, blocks, heads, before
    )


def chunk_options() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "chunk_tokens": st.integers(1, 8),
            "chunk_store": st.sampled_from(["host", "device"]),
            "prefetch_chunks": st.integers(0, 3),
        }
    )


@st.composite
def ring_options(draw: st.DrawFn, inner: int) -> dict[str, Any]:
    way = draw(st.sampled_from(["same", "reversed", "all_gather"]))
    if way == "all_gather":
        return {"kv_transport": "all_gather"}
    if way == "reversed":
        return {"backward_order": "reversed"}
    return {
        "deferred_local_tiles": draw(st.integers(0, inner)),
        "backward_circulates": draw(st.sampled_from(["kv", "q"])),
    }


PLANNERS: dict[str, st.SearchStrategy[Case]] = {
    "ring": methods(rings=True),
    "exchange": methods(),
    "chunks": methods(chunked=True),
    "recompute": st.booleans().flatmap(lambda chunked: methods(chunked=chunked, cut=True)),
}


EXAMPLES = {**dict.fromkeys(PLANNERS, 60), "chunks": 35}  # of chunks one takes twice as long


@pytest.mark.parametrize(
    ("planner", "examples"), [*EXAMPLES.items(), pytest.param("chunks", 120, marks=pytest.mark.thorough)]
)
def test_all_plans_of_a_planner_equal_dense_attention(planner: str, examples: int) -> None:
    settings(max_examples=examples, deadline=None, derandomize=True)(given(PLANNERS[planner], st.data())(prove))()


def prove(case: Case, data: st.DataObject) -> None:
    whole = case.plan(None)
    kernel = data.draw(st.sampled_from([ReferenceKernel(), CpuFlashKernel()]))
    late = data.draw(st.booleans())
    check_plans(whole, case.mask, case.blocks, case.heads, kernel=kernel, late=late, before=case.before)
    rank = data.draw(st.integers(0, case.blocks.rank_layout.size - 1))
    alone = case.plan(rank)
    for name in ("forward", "recompute", "backward"):
        if getattr(whole, name) is not None:
            assert same_but_for_step_numbers(getattr(alone, name).ranks[rank], getattr(whole, name).ranks[rank])
