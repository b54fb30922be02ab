"""What can be measured, and starting ranks: their place, what a failure says, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from testkit.waiting import wait_for

from engine.bench import spec
from engine.bench.ranks import RankProgram, measure_cell, run_ranks
from engine.bench.spec import AttentionCell, HeadShape, MachineCell, RankSetup, Rounds, check_points
from engine.config.errors import ConfigError, RunError
from engine.config.settings import AttentionConfig, ModelConfig
from engine.planning.methods.presets import PRESETS
from engine.runs.record import CODE_ROOT

FAKE = "tests.system.engine.bench.fake_rank"
GONE_S = 5.0


def alive(folder: Path) -> list[int]:
    living = []
    for file in folder.glob("pid*"):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
            process = psutil.Process(int(file.read_text() or 0))
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process.pid)
    return living


def test_environment_of_ranks_has_ids_with_the_code_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "own")
    monkeypatch.chdir(tmp_path)
    run_ranks(RankProgram(FAKE), RankSetup(ranks=4, nodes=2, threads=3), tmp_path)
    places = [json.loads((tmp_path / f"place{rank}.json").read_text()) for rank in range(4)]
    path = f"{CODE_ROOT}{os.pathsep}own"
    assert places == [[str(rank), "4", str(rank % 2), "2", "3", "1", "1", path, "True"] for rank in range(4)]


def test_placeholders_of_a_command_are_replaced(tmp_path: Path) -> None:
    program = RankProgram("some.module", ("ip", "netns", "exec", "n{node}r{local_rank}g{rank}"))
    argv = program.argv(5, RankSetup(ranks=8, nodes=2), tmp_path)
    assert argv == ["ip", "netns", "exec", "n1r1g5", sys.executable, "-m", "some.module", str(tmp_path)]


def test_the_result_of_rank_0_is_returned() -> None:
    cell = MachineCell(RankSetup(1), HeadShape(1, 1, 8), 1.0)
    assert measure_cell(cell, RankProgram(FAKE)) == {"results": ["measured"]}


def test_a_failed_rank_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "fail")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:surrogateescape")
    with pytest.raises(RunError) as caught:
        run_ranks(RankProgram(FAKE), RankSetup(ranks=3), tmp_path)
    assert str(caught.value).splitlines() == [
        "bench: rank 1 failed first, exit code -9; ranks 2 failed after it. Its last words:",
        *(f"    the pressure fell {time}\ufffd" for time in range(5, 20)),
        f"Its command: {sys.executable} -m {FAKE} {tmp_path}",
    ]
    assert alive(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_no_rank_survives_its_starter(tmp_path: Path, number: int) -> None:
    code = (
        "from engine.bench.ranks import *; from engine.bench.spec import *\n"
        f"measure_cell(MachineCell(RankSetup(2), HeadShape(1, 1, 8), 1.0), RankProgram({FAKE!r}))"
    )
    environment = os.environ | {"FAKE_MODE": "hang", "FAKE_PIDS": str(tmp_path)}
    starter = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(alive(tmp_path)) == 2)
    starter.send_signal(number)
    starter.wait(timeout=200)
    wait_for(lambda: not alive(tmp_path), "the end of the ranks", GONE_S)


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (3, 1), (4, 2), (8, 2)])
def test_every_preset_is_legal_or_refused_with_a_reason(ranks: int, nodes: int) -> None:
    variants, setup = (*PRESETS, "burst:ring_inner_size=5"), RankSetup(ranks, nodes)
    cell = AttentionCell(variants, "causal", 4096, setup, HeadShape(8, 8, 64), Rounds(1))
    legal, skipped = cell.legal_variants()
    assert sorted([*legal, *skipped]) == sorted(cell.variants)
    assert all(skipped.values())
    assert "5" in skipped["burst:ring_inner_size=5"]
    assert ranks == 1 or "one rank" in skipped["single"]
    assert ("single" in legal) == (ranks == 1)
    assert "ring" in legal


def test_point_is_read_from_its_settings() -> None:
    point = spec.read_attention("burst:backward_circulates=q:kernel=reference", "window:window_tokens=8")
    assert point == AttentionConfig(
        preset="burst", backward_circulates="q", kernel="reference", mask="window", window_tokens=8
    )


def test_cell_is_read_back_from_its_folder(tmp_path: Path) -> None:
    shape = HeadShape(4, 2, 16, "float32")
    cell = AttentionCell(("ring", "burst"), "full", 64, RankSetup(4, 2, 3, "nccl"), shape, Rounds(3, 2))
    spec.write_cell(cell, tmp_path)
    assert spec.read_cell(AttentionCell, tmp_path) == cell


@pytest.mark.parametrize(("hidden", "ffn", "heads"), [(64, 170, 4), (8, 21, 1)])
def test_model_of_a_machine_cell_has_the_hidden_size(hidden: int, ffn: int, heads: int) -> None:
    cell = MachineCell(RankSetup(1), HeadShape(4, 2, 16, "float32"), 1.0)
    sizes = {"hidden_size": hidden, "ffn_hidden_size": ffn, "num_heads": heads, "num_kv_heads": heads}
    assert cell.model(hidden, 3) == ModelConfig(vocab_size=256, head_dim=16, num_layers=3, **sizes)


def test_run_of_a_machine_cell_is_a_ring_over_its_nodes() -> None:
    cell = MachineCell(RankSetup(4, 2), HeadShape(4, 2, 16, "float32"), 1.0)
    config = cell.run_config(2, 64)
    assert config.train.seq_len == 256
    assert config.train.compute_dtype == "float32"
    assert config.model == cell.model(64, 2)
    assert config.attention.preset == "ring"
    assert config.cluster.topology_groups == 2


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: RankSetup(6, 4), "got 4 nodes for 6 ranks; legal numbers of nodes: 1, 2, 3, 6"),
        *(
            (lambda part=part: check_points([f"ring:{part}"], ["causal"]), f"got {part!r} after the name")
            for part in ("", "layout", "=striped")
        ),
        (lambda: MachineCell(RankSetup(1), HeadShape(1, 1, 7), 1.0).run_config(1), "head_dim"),
        (lambda: check_points(["rong"], ["causal"]), "bench: 'rong' is no preset of attention; legal: single, ring, "),
        (
            lambda: check_points(["ring", "ring:wheels=1"], ["causal", "full"]),
            "bench: ring:wheels=1 under mask causal: wheels: no such setting",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert problem in str(caught.value)
