"""What public implementations are compared with."""

from __future__ import annotations

from benchmarks.peers.methods import COUNTERPARTS, PEERS
from engine.bench.spec import check_points


def test_every_peer_has_a_counterpart_that_can_be_configured() -> None:
    assert set(COUNTERPARTS) == set(PEERS)
    check_points(COUNTERPARTS.values(), ["causal"])
