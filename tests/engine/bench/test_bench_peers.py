"""What the comparison with public implementations says about its figures, and how it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_peers import main, peer_wins, same_methods
from benchmarks.peers.methods import COUNTERPARTS, PEERS
from engine.bench.spec import check_points


def row(variant: str, median_s: float, error: float = 1e-3) -> dict[str, Any]:
    timing = {"median_s": median_s, "min_s": 0.9 * median_s, "max_s": 1.1 * median_s}
    errors = {"out": error, "dq": 1e-3, "dk": 1e-3, "dv": 1e-3}
    return {"variant": variant, "peer": variant in PEERS, "total": timing, "relative_error": errors}


def test_a_faster_peer_is_named_with_its_margin() -> None:
    rows = [row("ring", 2.0), row("burst", 1.0), row("yunchang/usp", 0.5), row("ring-flash-attn/zigzag", 1.5)]
    assert peer_wins(rows) == ["yunchang/usp is faster than burst: 0.50x its time"]


def test_a_clearly_more_exact_peer_is_named_and_an_equal_one_is_not() -> None:
    rows = [row("burst", 1.0), row("yunchang/usp", 2.0, 0.99e-3), row("yunchang/ulysses", 2.0, 0.9e-3)]
    assert peer_wins(rows) == ["yunchang/ulysses has the smaller error in out: 9.00e-04 against 1.00e-03"]


def test_a_peer_is_compared_with_the_same_method_of_ours() -> None:
    rows = [row("ring", 2.0), row("burst", 1.0), row("ring-flash-attn/zigzag", 3.0), row("yunchang/usp", 0.5)]
    assert same_methods(rows) == ["ring-flash-attn/zigzag takes 1.50x the time of ring"]


def test_every_peer_has_a_counterpart_that_can_be_configured() -> None:
    assert set(COUNTERPARTS) == set(PEERS)
    check_points(COUNTERPARTS.values(), ["causal"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--peers", "deepspeed"), "unknown deepspeed"),
        (("--ours", "brust"), "is no preset"),
        (("--packages", "nowhere"), "pip install --no-deps --target"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = tuple(str(tmp_path / word) if word == "nowhere" else word for word in argv)
    assert main(argv) == 2
    assert words in capsys.readouterr().err
