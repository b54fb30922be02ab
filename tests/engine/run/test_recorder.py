"""What rank 0 writes, what other ranks do not, and TensorBoard where it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import ConfigError
from engine.data.build import Progress
from engine.runs.folder import RunFolder, create_run
from engine.training.rank.process import RankStatus
from engine.training.rank.recorder import Recorder, open_tensorboard, progress_line

ROW: dict[str, Any] = {
    "step": 3,
    "loss": 2.5,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "tokens_per_s": 12345.6,
    "mfu": 0.421,
    "peak_memory_bytes": 3 * 2**30,
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "exp" / "20260101-000000-abcdef", {})


def recorder(run: RunFolder, *, rank: int = 0, tensorboard: bool = False) -> Recorder:
    return Recorder(run, RankStatus(), rank=rank, tensorboard=tensorboard)


def test_a_line_names_every_figure_it_has() -> None:
    assert progress_line(ROW, 10) == (
        "step 3/10  loss 2.5000  grad_norm 1.000  lr 1.00e-03  12,346 tokens/s  mfu 42.1%  memory 3.00 GiB"
    )
    measured = {
        "validation_loss": 2.0,
        "validation_bits_per_byte": 1.5,
        "validation_loss_by_position": [{"first": 0, "last": 1999, "loss": None}],
        "needle_accuracy": 0.5,
        "needle_gain": 0.25,
        "needle_by_depth": [{"depth": 1.0, "gain": -0.125}],
    }
    assert progress_line({**ROW, "mfu": None, "peak_memory_bytes": None, **measured}, 10) == (
        "step 3/10  loss 2.5000  grad_norm 1.000  lr 1.00e-03  12,346 tokens/s  validation_loss 2.0000  "
        "bits_per_byte 1.5000  [0 to 1,999] none  needle_accuracy 0.50  needle_gain 0.2500  [depth 100%] -0.1250"
    )


def test_rank_0_writes_and_other_ranks_only_keep_their_phase(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    status = RankStatus()
    other = Recorder(run, status, rank=1, tensorboard=False)
    other.phase("train")
    other.step(ROW, 10)
    other.warn("odd")
    assert (status.phase, run.read_metrics(), run.read_events()) == ("train", [], [])
    recorder(run).step(ROW, 10)
    assert run.read_metrics() == [ROW]
    assert capsys.readouterr().out.count("step 3/10") == 1


def test_every_report_of_a_preparation_shows_that_it_goes_on(run: RunFolder) -> None:
    status = RankStatus()
    other = Recorder(run, status, rank=1, tensorboard=False)
    for documents in (1, 2, 3):
        other.preparing(Progress("encode", documents))
    assert status.advances == 3


def test_rank_0_keeps_the_tokenizer_in_the_run_folder(run: RunFolder, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    recorder(run).keep(source)  # bytes need none
    source.write_text("{}")
    recorder(run, rank=1).keep(source)
    assert not (run.path / "tokenizer.json").exists()
    recorder(run).keep(source)
    assert (run.path / "tokenizer.json").read_text() == "{}"


def test_a_warning_is_said_once(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    writer = recorder(run)
    for message in (None, "first", "second"):
        writer.warn(message)
    assert capsys.readouterr().out == "warning: first\n"
    assert [event["message"] for event in run.read_events()] == ["first"]


def test_tensorboard_gets_every_figure(run: RunFolder) -> None:
    writer = recorder(run, tensorboard=True)
    writer.step({**ROW, "mfu": None}, 10)
    writer.close()
    (events,) = (run.path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"tokens_per_s" in content
    assert b"mfu" not in content


def test_missing_tensorboard_is_a_config_error_with_the_remedy(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"set train\.tensorboard=false"):
        open_tensorboard(run, "not_installed")
