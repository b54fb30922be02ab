"""`burst bench machine`: a profile of this machine that plans use, whatever the figures are."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from testkit.command_line import Result
from testkit.terminal import lines_of, text_of

from burst_cli.app import main
from burst_cli.bench.view import machine_view
from engine.predict.machine import find_machine, machine_fields

SMALL = ("--heads", "2", "--head-dim", "16", "--seconds", "0.1")


def run(*argv: str) -> Result:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([*argv])
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile that one process measured."""
    return measure(tmp_path_factory.mktemp("machine"), "--ranks", "1")


def measure(folder: Path, *argv: str) -> Path:
    path = folder / "new" / "mine.json"
    code, out, err = run("bench", "machine", *argv, *SMALL, "--output", str(path))
    assert code == 0, err
    assert (f"use it with --device {path}" in err, "the host, per step" in out) == (True, True)
    return path


def test_a_profile_has_every_rate_of_the_measured_machine(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_text())
    measured = document["measured"]
    assert {"date", "device", "cores", "threads", "load", "torch"} <= set(measured)
    threads = len(os.sched_getaffinity(0))
    assert measured["setup"] == {"ranks": 1, "nodes": 1, "threads": threads, "backend": "gloo"}
    assert measured["shape"] == {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    machine = find_machine(str(path))
    assert all(math.isfinite(getattr(machine, name)) for name in machine_fields())
    assert (machine.is_cpu, machine.local_ranks) == (True, 1)
    assert 0 <= machine.message_compute_share <= 1
    for rate, series in (
        (machine.product_flops_per_s, measured["series"]["product_flops_per_s"]),
        (machine.moved_bytes_per_s, measured["series"]["elementwise_bytes_per_s"]),
        (lambda rows: machine.tile_flops_per_s("backward", rows), measured["series"]["backward_flops_per_s"]),
    ):
        assert [rate(size) for size, _ in series] == pytest.approx([value for _, value in series])


@pytest.mark.thorough
def test_links_between_nodes_are_measured_where_there_are_several(tmp_path: Path) -> None:
    series = json.loads(measure(tmp_path, "--ranks", "2", "--nodes", "2").read_text())["measured"]["series"]
    assert (len(series["intra_message_s"]), len(series["inter_message_s"]) > 1) == (0, True)


def test_a_plan_has_the_ranks_of_the_profile(path: Path) -> None:
    argv = ("plan", "exp=tiny", "cluster.ranks_per_node=null", "--memory-by", "none", "--device", str(path))
    told = [(code, (out or err).splitlines()[0]) for code, out, err in (run(*argv), run(*argv, "--ranks", "2"))]
    on = "plan    tiny, attention=burst: 2,048 tokens on"
    assert told == [(0, f"{on} 1 rank (as many per node as the profile was measured with)"), (0, f"{on} 2 ranks")]
    assert "the number of ranks is unknown" in run(*argv, "--nodes", "2")[2]


def test_a_launch_passes_the_profile_to_ranks(path: Path) -> None:
    planned = run("plan", "exp=tiny", "--memory-by", "none", "--json", "--device", str(path)).document["step_time"]
    assert (planned["machine"], planned["seconds"] > 0) == (str(path), True)
    launched = run("launch", "exp=tiny", f"cluster.machine.name={path}", "--dry-run", "--json").document["files"]
    assert json.loads(launched["memory_plan.json"])["step_time"] == planned
    given = yaml.safe_load(launched["config.yaml"])["cluster"]["machine"]
    assert given["name"] == "cpu"  # the profile lies here, and ranks may not
    assert f"intra_bytes_per_s={find_machine(str(path)).intra_bytes_per_s!r}" in given["rates"]


def test_what_cannot_be_measured_or_written_is_refused_first() -> None:
    for argv, word in [
        (["--output", "machine.txt"], "ends in .json"),
        (["--ranks", "3", "--nodes", "2"], "legal numbers of nodes: 1, 3"),
        (["--ranks", "2", "--nodes", "4"], "legal numbers of nodes: 1, 2"),
        (["--nodes", "0"], "'--nodes'"),
        (["--ranks", "1", "--threads", "1", "--head-dim", "7"], "model.head_dim: got 7, expected an even number"),
        (["--seconds", "inf"], "'--seconds'"),
    ]:
        code, _, err = run("bench", "machine", *argv)
        assert (code, word in " ".join(err.split())) == (2, True), err


def test_a_profile_as_people_read_it() -> None:
    rates = ("matmul", "forward", "backward"), ("elementwise", "update", "intra", "inter", "host")
    machine = {f"{name}_flops_per_s": 1e9 * place for place, name in enumerate(rates[0], 1)}
    machine |= {f"{name}_bytes_per_s": 1e6 * place for place, name in enumerate(rates[1], 1)}
    times = ("intra_latency_s", "inter_latency_s", "layer_overhead_s", "step_overhead_s")
    machine |= {name: 0.001 * place for place, name in enumerate(times, 1)}
    shares = {"matmul_shares": [(64, 0.5), (1024, 1.0)], "elementwise_shares": [(1000, 0.25)]}
    measured = {"cores": 2, "setup": {"ranks": 2}, "device": "a processor"}
    busy, quiet = (
        lines_of(machine_view({"machine": machine | shares, "measured": measured | {"load": load}}), width=100)
        for load in (3.1, 3.0)
    )
    assert quiet == [*busy[:-2], "device a processor, cores 2, load 3.0"]
    rows = text_of(machine_view({"machine": machine | shares, "measured": measured | {"load": 0.0}})).splitlines()[:13]
    ends = {row.index(size) + len(size) for row, size in zip(rows, ("size", "64", "1,024"), strict=False)}
    assert (len(ends), len({*map(len, rows)})) == (1, 1)  # figures stand right
    assert busy == [
        "of a rank size rate",
        "products of matrices, by their smallest side 64 500 MFLOP/s",
        "1,024 1 GFLOP/s",
        "attention forward, by rows of a tile 2 GFLOP/s",
        "attention backward, by rows of a tile 3 GFLOP/s",
        "the rest of a layer, by bytes of its input 1,000 250 KB/s",
        "the optimizer 2 MB/s",
        "to a rank of the same node 3 MB/s",
        "to a rank of another node 4 MB/s",
        "to host memory 5 MB/s",
        "a message without bytes, same node 1 ms",
        "a message without bytes, another node 2 ms",
        "the host, per layer and step 3 ms",
        "the host, per step 4 ms",
        "load 3.1 on 2 cores: other work took a part of every rate; measure again when it is quiet",
        "device a processor, cores 2, load 3.1",
    ]
