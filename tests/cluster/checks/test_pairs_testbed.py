"""Pairs over real links of a testbed: a cut pair, a cut-off node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from testkit.connecting import connect
from testkit.testbed_fixture import MakeTestbed

from cluster.checks.finding import Verdict
from cluster.checks.groups.pairs import check_pairs
from cluster.ssh.connection import Connection
from cluster.testbed.build import Testbed


@contextlib.contextmanager
def connected(testbed: Testbed) -> Iterator[tuple[dict[str, Connection], dict[str, str]]]:
    """(connections, addresses) of all nodes."""
    with contextlib.ExitStack() as stack:
        connections: dict[str, Connection] = {
            name: stack.enter_context(connect(testbed.host(name))) for name in testbed.node_names
        }
        yield connections, {name: testbed.node(name).address for name in testbed.node_names}


def drop(connections: dict[str, Connection], node: str, address: str) -> None:
    """From now on the node answers nothing that comes from there."""
    rule = ["iptables", "-A", "INPUT", "-s", address, "-j", "DROP"]
    assert connections[node].run(rule).ok


def test_a_cut_pair_and_a_node_that_is_cut_off_are_named(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(nodes=4)
    one, two, three, four = testbed.node_names
    with connected(testbed) as (connections, addresses):
        assert {finding.severity for finding in check_pairs(connections, addresses)} == {Verdict.OK}
        drop(connections, two, addresses[four])
        cut = {finding.node: finding for finding in check_pairs(connections, addresses, timeout_s=1.0)}
        assert [cut[name].severity is Verdict.FAIL for name in (one, two, three, four)] == [False, True, False, True]
        assert f"{two} → {four} timeout" in cut[two].observed
        assert f"{four} → {two} timeout" in cut[four].observed
        for name in (one, three, four):
            drop(connections, two, addresses[name])
        lost = {finding.node: finding for finding in check_pairs(connections, addresses, timeout_s=1.0)}
        assert [lost[name].severity is Verdict.FAIL for name in (one, two, three, four)] == [False, True, False, False]
