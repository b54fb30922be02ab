"""`burst check-nodes --collectives`: what the ranks measure, who is called slow, and the launch that does it."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit import write_program
from testkit.command_line import Burst
from testkit.terminal import text_of
from testkit.testbed_fixture import MakeTestbed, Testbeds

from burst_cli.nodes.collectives import collectives_view, judged
from cluster.testbed.faults import set_fault
from cluster.testbed.testbed import Testbed
from engine.bench.collective_times import SIZES, exchange_pairs, measure_collectives, plan_rounds, sweep
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig, config_from_dict
from engine.runs.folder import RunFolder, create_run, open_run
from engine.training.rank.process import RankStatus

# In the place of Python, torchrun and ranks: measured already.
RANKS = """
import sys
from engine.runs.folder import open_run
run = open_run(sys.argv[-1])
run.transition("running")
run.write_summary({found})
run.transition("completed")"""
CPU = torch.device("cpu")
SHARES = {"all_reduce": 6 / 4, "all_to_all": 3 / 4}  # of four ranks, by PERFORMANCE.md of nccl-tests


def test_busbw_is_what_crosses_a_link_in_the_time_of_the_slowest_rank(ranks: Any) -> None:
    assert tuple(4**power for power in range(8, 15)) == SIZES
    rows, *others = ranks(4).run(sweep, CPU, SIZES[:2])
    assert [(row["operation"], row["bytes"]) for row in rows] == list(product(SHARES, SIZES[:2]))
    for row in rows:
        assert row["busbw_gbps"] == pytest.approx(row["bytes"] * 8 / 1e9 / row["seconds"] * SHARES[row["operation"]])
    assert all(found == rows for found in others)


def test_nodes_are_paired_whatever_ranks_they_have(ranks: Any) -> None:
    of_two, *_ = ranks(4).run(exchange_pairs, CPU, 2)
    assert [pair["nodes"] for pair in of_two] == [[0, 1]]
    of_one, *_ = ranks(4).run(exchange_pairs, CPU, 1)
    assert sorted(pair["nodes"] for pair in of_one) == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert all(1e-3 < pair["gbps"] < 1e4 for pair in (*of_one, *of_two))


def measured(path: str, config: RunConfig) -> str:
    """What the error says that a rank ends with, or nothing."""
    try:
        measure_collectives(config, RunFolder(Path(path)), RankStatus())
    except ConfigError as error:
        return str(error)
    return ""


MISFITS = [(2, 4, "= 4 ranks, but 2 ranks were started"), (1, 1, "collectives need two ranks:"), (2, 2, "")]


@pytest.mark.parametrize(("count", "configured", "problem"), MISFITS)
def test_measured_collectives_are_in_the_summary(
    ranks: Any, tmp_path: Path, count: int, configured: int, problem: str
) -> None:
    run = create_run(tmp_path / "run", {})
    run.transition("starting")
    config = config_from_dict({"cluster": {"ranks_per_node": configured}})
    said = ranks(count).run(measured, str(run.path), config)
    assert [problem in text and bool(problem) == bool(text) for text in said] == [True] * count
    summary = run.read_summary() or {"collectives": [], "pairs": []}
    assert list(summary) == ["collectives", "pairs"]
    assert {row["operation"] for row in summary["collectives"]} == (set() if problem else set(SHARES))
    assert (summary["pairs"], run.read_state()["state"] == "completed") == ([], not problem)


@given(count=st.integers(1, 40))
def test_every_pair_is_measured_once(count: int) -> None:
    rounds = plan_rounds(count)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2


@given(count=st.integers(1, 40))
def test_no_node_is_twice_in_a_round(count: int) -> None:
    rounds = plan_rounds(count)
    for present in rounds:
        seen = [node for pair in present for node in pair]
        assert len(seen) == len(set(seen))


def test_slow_nodes_explain_their_slow_pairs() -> None:
    cases: list[tuple[dict[str, float], list[str], list[list[str]]]] = [
        ({"ab": 5, "ac": 10, "bc": 5}, [], []),
        ({"ab": 4.9, "ac": 10, "bc": 4.9}, ["b"], []),
        ({"ab": 10, "ac": 10, "ad": 10, "bc": 10, "bd": 10, "cd": 5}, [], []),
        ({"ab": 10, "ac": 10, "ad": 2, "bc": 10, "bd": 2, "cd": 2}, ["d"], []),
        ({"ab": 10, "ac": 10, "ad": 10, "bc": 10, "bd": 10, "cd": 2}, [], [["c", "d"]]),
        ({"ab": 2}, [], []),  # with nothing to compare with
        ({}, [], []),
    ]
    for rates, slow_nodes, slow_pairs in cases:
        nodes = sorted({node for pair in rates for node in pair}) or ["a"]
        pairs = [{"nodes": [nodes.index(node) for node in pair], "gbps": rate} for pair, rate in rates.items()]
        found = judged({"collectives": [], "pairs": pairs}, nodes)
        assert (found["slow_nodes"], [pair["nodes"] for pair in found["slow_pairs"]]) == (slow_nodes, slow_pairs)


def test_view_of_collectives_ends_with_slow_nodes() -> None:
    pairs = [{"nodes": pair, "gbps": 10} for pair in ([0, 1], [0, 2], [0, 3], [1, 2], [1, 3])]
    pairs += [{"nodes": [2, 3], "gbps": 4}, *({"nodes": [at, 4], "gbps": 2} for at in range(4))]
    row = {"operation": "all_reduce", "bytes": 1 << 16, "seconds": 0.0082, "busbw_gbps": 0.0959}
    documents = ({"collectives": [row], "pairs": measured} for measured in (pairs, []))
    views = (collectives_view(judged(document, ["a", "b", "c", "d", "e"])) for document in documents)
    table = ["operation     size    time  busbw Gbit/s", "all_reduce  64 KiB  8.2 ms        0.0959"]
    assert [line.rstrip() for line in text_of(*views, width=100).splitlines()] == [
        *table,
        "between two nodes, both ways at once: 10 Gbit/s is usual",
        "e is slow with most others: 2 Gbit/s",
        "c and d: 4 Gbit/s",
        "compare cable, switch port, negotiated speed and MTU with those of the others",
        *table,
    ]


def test_a_dry_run_of_collectives_creates_nothing(burst, testbed4: Testbed, clean_home, monkeypatch) -> None:
    assert testbed4.config_file is not None
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path(testbed4.config_file).parents[3]))
    result = burst("check-nodes", f"cluster={testbed4.name}", "--collectives", "--dry-run", "--json")
    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert [node["name"] for node in plan["nodes"]] == list(testbed4.node_names)
    assert Path(plan["path"]).parent == clean_home / "runs" / "collectives"
    assert all("engine.bench.collectives" in node["command"] for node in plan["nodes"])
    assert not (clean_home / "runs").exists()


@pytest.mark.parametrize(("rate", "code"), [(5, 0), (4, 1)])
def test_what_ranks_of_this_machine_found_is_told_in_the_exit_code_too(burst, tmp_path: Path, rate, code) -> None:
    pairs = [{"nodes": [0, 0], "gbps": gbps} for gbps in (10, rate)]
    python = write_program(tmp_path / "python", RANKS.format(found={"collectives": [], "pairs": pairs}), sys.executable)
    ranks = ("cluster.ranks_per_node=2", "cluster.backend=gloo", f"cluster.python={python}")
    result = burst("check-nodes", "--local", "--collectives", *ranks, "--json")
    document = result.document
    run = open_run(document.pop("run"))
    assert (result.code, run.exp, run.read_state()["world_size"]) == (code, "collectives", 2)
    (named,) = {node for pair in document["pairs"] for node in pair["nodes"]}
    told = {"backend": "gloo", "ranks": 2, **judged({"collectives": [], "pairs": pairs}, [named])}
    assert document == told
    python.write_text("#!/bin/sh\nexit 3\n")
    failed = burst("check-nodes", "--local", "--collectives", *ranks)
    assert (failed.code, failed.out, "exit code 3" in failed.err) == (1, "", True)


@pytest.mark.thorough  # torch starts on four nodes
def test_a_node_behind_a_slow_link_is_named_by_a_real_launch(
    burst: Burst, testbeds: Testbeds, make_testbed: MakeTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = make_testbed(nodes=4, rate="400mbit")  # two pairs at once
    slow = testbed.node_names[1]
    set_fault(testbed, slow, "link_slow", "60mbit")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(testbeds.config_file(testbed.name).parents[3]))
    result = burst("check-nodes", f"cluster={testbed.name}", "cluster.ranks_per_node=1", "--collectives", "--json")
    assert result.code == 1, result.err
    found = json.loads(result.out)
    assert (found["slow_nodes"], found["slow_pairs"], found["backend"]) == ([slow], [], "gloo")
    assert 0.01 < found["node_gbps"][slow] < 0.08
    assert found["node_gbps"][slow] * 2 < found["usual_gbps"] < 0.45
