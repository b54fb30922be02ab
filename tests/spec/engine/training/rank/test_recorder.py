"""What rank 0 writes, what other ranks do not, and TensorBoard where it is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.golden import Golden

from engine.config.errors import ConfigError
from engine.data.build import Progress
from engine.runs.folder import RunFolder, create_run
from engine.training.guard import Verdict
from engine.training.rank.process import RankStatus
from engine.training.rank.recorder import Recorder, open_tensorboard, progress_line

TRAINED: dict[str, Any] = {"loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 12345.6}
ROW: dict[str, Any] = {"step": 3, **TRAINED, "mfu": 0.421, "peak_memory_bytes": 3 * 2**30}
VALIDATED: dict[str, Any] = {
    "validation_loss": 2.0,
    "validation_bits_per_byte": 1.5,
    "validation_loss_by_position": [{"first": 0, "last": 1999, "loss": None}],
    "needle_accuracy": 0.5,
    "needle_gain": 0.25,
    "needle_by_depth": [{"depth": 1.0, "gain": -0.125}],
}
LINE = "step 3/10  loss 2.5000  gradient norm 1.000  learning rate 1.00e-03  12.3K tokens/s"
OF_VALIDATION = (
    "validation loss 2.0000  bits/byte 1.5000  [0 to 1,999] –  needles right 0.5000  needle gain 0.2500  "
    "[depth 100%] -0.1250"
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "exp" / "20260101-000000-abcdef", {})


def recorder(run: RunFolder, *, rank: int = 0, tensorboard: bool = False) -> Recorder:
    return Recorder(run, RankStatus(), rank=rank, tensorboard=tensorboard)


def test_a_line_names_every_figure_it_has() -> None:
    assert progress_line(ROW, 10) == f"{LINE}  MFU 42.1%  memory 3 GiB"
    assert progress_line({**ROW, "mfu": None, "peak_memory_bytes": None, **VALIDATED}, 10) == f"{LINE}  {OF_VALIDATION}"
    assert progress_line({"step": 5, **VALIDATED, "peak_memory_bytes": 2**30}, None) == f"step 5  {OF_VALIDATION}"


def test_rank_0_writes_rows(run: RunFolder) -> None:
    recorder(run).row(ROW, 10)
    assert run.read_metrics() == [ROW]


def test_rank_0_copies_the_tokenizer(run: RunFolder, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    recorder(run).save(source)
    assert (run.path / "tokenizer.json").read_text() == "{}"


def test_tokenizer_without_a_file_needs_no_copy(run: RunFolder, tmp_path: Path) -> None:
    recorder(run).save(tmp_path / "tokenizer.json")  # that of bytes has none
    assert not (run.path / "tokenizer.json").exists()


def test_other_ranks_write_nothing(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    other = recorder(run, rank=1)
    other.phase("train")
    other.row(ROW, 10)
    other.warn("odd")
    other.save(source)
    assert run.read_metrics() == []
    assert run.read_events() == []
    assert not (run.path / "tokenizer.json").exists()
    assert capsys.readouterr().out == ""


def test_other_ranks_update_their_status(run: RunFolder) -> None:
    status = RankStatus()
    other = Recorder(run, status, rank=1, tensorboard=False)
    other.phase("train")
    for documents in (1, 2, 3):
        other.preparing(Progress("encode", documents))
    assert status.phase == "train"
    assert status.advances == 3


def record_everything(run: RunFolder) -> None:
    """One of everything that rank 0 records."""
    writer = recorder(run)
    writer.phase("train")
    writer.announce_faults(["nan on rank 1 at step 3"])
    for documents in (1, 2):
        writer.preparing(Progress("survey", documents))
    writer.note("a disk is slow")
    for message in (None, "first", "second"):
        writer.warn_once(message)
    writer.kernel_chosen("cpu_flash", "auto", {"fa3": "runs on cuda only"})
    writer.restored(4, "a run")
    writer.saved(5, 3 << 19, 0.25, 1.5)
    writer.dropped(6, Verdict("skip", "the loss is nan"), range(8, 12))
    writer.row({"step": 5, "validation_loss": 2.0})


def test_events_are_for_programs(run: RunFolder, golden: Golden) -> None:
    record_everything(run)
    events = [{key: value for key, value in event.items() if key != "at"} for event in run.read_events()]
    golden("run/events.jsonl", "".join(f"{json.dumps(event, sort_keys=True)}\n" for event in events))


def test_printed_lines_are_for_people(run: RunFolder, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    record_everything(run)
    golden("run/printed.txt", capsys.readouterr().out)


def test_warning_that_is_given_once_is_the_first(run: RunFolder) -> None:
    writer = recorder(run)
    for message in (None, "first", "second"):
        writer.warn_once(message)
    assert [event["message"] for event in run.read_events()] == ["first"]


def test_tensorboard_gets_every_known_figure(run: RunFolder) -> None:
    writer = recorder(run, tensorboard=True)
    writer.row({**ROW, "mfu": None}, 10)
    writer.row({"step": 5, "validation_loss": 2.0})
    writer.close()
    (events,) = (run.path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert [name in content for name in (b"tokens_per_s", b"validation_loss", b"mfu")] == [True, True, False]


def test_missing_tensorboard_is_an_error(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"set train\.tensorboard=false"):
        open_tensorboard(run, "not_installed")
