"""Few cases that hold every pair of values: of a parametrised test (a pytest plugin), or made up from axes.

@pytest.mark.pairwise: of a product of parameters, cases remain that hold every pair of values of two of them
@pytest.mark.thorough_for("a", "b"): the cases with these ids are thorough
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import pytest

Case = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

TRIES = 100  # cases that are made up for a pair, of which the one with most new pairs is taken
LAST_TRIES = 300  # before a pair is called impossible


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairwise: cases that show no new pair of values are thorough")
    config.addinivalue_line("markers", "thorough_for(*ids): the cases of these ids are thorough")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    products: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        case = getattr(item, "callspec", None)
        if case is None:
            continue
        if any(case.id in mark.args for mark in item.iter_markers("thorough_for")):
            item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("pairwise"):
            products[item.nodeid.partition("[")[0]].append(item)
    for same in products.values():
        chosen = covering([{name: repr(value) for name, value in item.callspec.params.items()} for item in same])  # type: ignore[attr-defined]
        for number, item in enumerate(same):
            if number not in chosen:
                item.add_marker(pytest.mark.thorough)


def covering(cases: Sequence[Case]) -> set[int]:
    """Indices of few cases that hold every pair of values that any case holds; greedy, most new pairs first."""
    pairs = [set[object](pairs_of(case) or case.items()) for case in cases]  # of one axis, its values
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def covering_cases(axes: Mapping[str, Sequence[str]], legal: Callable[[Case], bool]) -> list[Case]:
    """Few legal cases that hold every pair of values that any legal case holds; the same ones in every process."""
    missing = dict.fromkeys(
        ((a, x), (b, y)) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b]
    )  # a dict, for the order
    rng, cases = random.Random(0), list[Case]()
    while missing:
        pair, best, most = next(iter(missing)), Case(), 0
        for number in range(LAST_TRIES):
            case = {axis: rng.choice(values) for axis, values in axes.items()} | dict(pair)
            gain = sum(held in missing for held in pairs_of(case))
            if gain > most and legal(case):
                best, most = case, gain
            if best and number >= TRIES:
                break
        cases += [best] if best else []
        for held in pairs_of(best) or [pair]:
            missing.pop(held, None)
    return cases


def pairs_of(case: Case) -> list[Pair]:
    """Every two values of a case, in the order of its axes."""
    return list(itertools.combinations(case.items(), 2))
