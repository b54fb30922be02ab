"""A pytest plugin: which cases of a parametrised test are left to `make thorough`.

@pytest.mark.pairwise: of a product of parameters, cases remain that hold every pair of values of two of them
@pytest.mark.thorough_for("a", "b"): the cases with these ids are thorough
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

Case = dict[str, str]


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
    pairs = [set(_pairs(case)) for case in cases]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _pairs(case: Case) -> Iterable[object]:
    items = sorted(case.items())
    return itertools.combinations(items, 2) if len(items) > 1 else items
