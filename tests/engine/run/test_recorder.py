"""What rank 0 writes, what other ranks do not, and TensorBoard where it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import ConfigError
from engine.data.build import Progress
from engine.runs.folder import RunFolder, create_run
from engine.training.guard import Verdict
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
    other.row(ROW, 10)
    other.warn("odd")
    for documents in (1, 2, 3):
        other.preparing(Progress("encode", documents))
    assert (status.phase, status.advances, run.read_metrics(), run.read_events()) == ("train", 3, [], [])
    recorder(run).row(ROW, 10)
    assert run.read_metrics() == [ROW]
    assert capsys.readouterr().out.count("step 3/10") == 1
    assert not (run.path / "tensorboard").exists()


def test_what_happens_is_an_event_for_programs_and_a_line_for_people(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = recorder(run)
    writer.phase("train")
    writer.announce_faults(["nan on rank 1 at step 3"])
    writer.preparing(Progress("survey", 1))
    writer.preparing(Progress("survey", 2))
    writer.note("a disk is slow")
    writer.kernel_chosen("cpu_flash", "auto", {"fa3": "runs on cuda only"})
    writer.restored(4, "a run")
    writer.saved(5, 3 << 19, 0.25, 1.5)
    writer.dropped(6, Verdict("skip", "the loss is nan"), range(8, 12))
    writer.row({"step": 5, "validation_loss": 2.0})
    assert [{key: value for key, value in event.items() if key != "at"} for event in run.read_events()] == [
        {"kind": "phase", "phase": "train"},
        {"kind": "fault_injected", "fault": "nan on rank 1 at step 3"},
        {"kind": "note", "message": "a disk is slow"},
        {"kind": "attention_kernel", "name": "cpu_flash", "reason": "auto", "others": {"fa3": "runs on cuda only"}},
        {"kind": "restored", "step": 4, "run_id": "a run"},
        {"kind": "checkpoint", "step": 5, "bytes": 3 << 19, "stall_s": 0.25, "seconds": 1.5},
        {
            "kind": "dropped",
            "step": 6,
            "reason": "the loss is nan",
            "reaction": "skip",
            "first_sample": 8,
            "last_sample": 11,
        },
    ]
    assert run.read_metrics() == [{"step": 5, "validation_loss": 2.0}]
    assert capsys.readouterr().out.splitlines() == [
        "warning: BURST_FAULT is set: nan on rank 1 at step 3",
        "prepare data: survey",
        "note: a disk is slow",
        "attention kernel cpu_flash (auto)",
        "going on after step 4, from a checkpoint of a run",
        "checkpoint of step 5: 1.5 MiB in 1.50 s, training stood 0.25 s",
        "step 6 is dropped (skip): the loss is nan; samples 8 to 11",
        "step 5  validation_loss 2.0000",
    ]


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
    writer.row({**ROW, "mfu": None}, 10)
    writer.row({"step": 5, "validation_loss": 2.0})
    writer.close()
    (events,) = (run.path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"tokens_per_s" in content
    assert b"validation_loss" in content
    assert b"mfu" not in content


def test_missing_tensorboard_is_a_config_error_with_the_remedy(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"set train\.tensorboard=false"):
        open_tensorboard(run, "not_installed")
