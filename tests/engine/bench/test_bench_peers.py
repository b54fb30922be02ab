"""What the comparison with public implementations says about its figures, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_peers import main
from benchmarks.peers.methods import COUNTERPARTS, PEERS
from engine.bench.spec import check_points


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
