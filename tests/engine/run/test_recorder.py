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


def test_rank_0_writes_and_other_ranks_only_keep_their_phase(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, status = tmp_path / "tokenizer.json", RankStatus()
    recorder(run).save(source)  # bytes need none
    source.write_text("{}")
    other = Recorder(run, status, rank=1, tensorboard=False)
    other.phase("train")
    other.row(ROW, 10)
    other.warn("odd")
    other.save(source)
    for documents in (1, 2, 3):
        other.preparing(Progress("encode", documents))
    assert status.phase == "train"
    assert status.advances == 3
    assert run.read_metrics() == []
    assert run.read_events() == []
    assert not (run.path / "tokenizer.json").exists()
    recorder(run).row(ROW, 10)
    recorder(run).save(source)
    assert run.read_metrics() == [ROW]
    assert (run.path / "tokenizer.json").read_text() == "{}"
    assert capsys.readouterr().out.count("step 3/10") == 1
    assert not (run.path / "tensorboard").exists()


def test_what_happens_is_an_event_for_programs_and_a_line_for_people(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = recorder(run)
    writer.phase("train")
    writer.announce_faults(["nan on rank 1 at step 3"])
    for documents in (1, 2):
        writer.preparing(Progress("survey", documents))
    writer.note("a disk is slow")
    for message in (None, "first", "second"):  # said once
        writer.warn_once(message)
    writer.kernel_chosen("cpu_flash", "auto", {"fa3": "runs on cuda only"})
    writer.restored(4, "a run")
    writer.saved(5, 3 << 19, 0.25, 1.5)
    writer.dropped(6, Verdict("skip", "the loss is nan"), range(8, 12))
    writer.row({"step": 5, "validation_loss": 2.0})
    samples = {"first_sample": 8, "last_sample": 11}
    assert [{key: value for key, value in event.items() if key != "at"} for event in run.read_events()] == [
        {"kind": "phase", "phase": "train"},
        {"kind": "fault_injected", "fault": "nan on rank 1 at step 3"},
        {"kind": "note", "message": "a disk is slow"},
        {"kind": "warning", "message": "first"},
        {"kind": "attention_kernel", "name": "cpu_flash", "reason": "auto", "others": {"fa3": "runs on cuda only"}},
        {"kind": "restored", "step": 4, "run_id": "a run"},
        {"kind": "checkpoint", "step": 5, "bytes": 3 << 19, "stall_s": 0.25, "seconds": 1.5},
        {"kind": "dropped", "step": 6, "reason": "the loss is nan", "reaction": "skip", **samples},
    ]
    assert run.read_metrics() == [{"step": 5, "validation_loss": 2.0}]
    assert capsys.readouterr().out.splitlines() == [
        "warning: BURST_FAULT is set: nan on rank 1 at step 3",
        "prepare data: survey",
        "note: a disk is slow",
        "warning: first",
        "attention kernel cpu_flash (auto)",
        "going on after step 4, from a checkpoint of a run",
        "checkpoint of step 5: 1.5 MiB in 1.5 s, training waited 250 ms",
        "step 6 is dropped (skip): the loss is nan; samples 8 to 11",
        "step 5  validation loss 2.0000",
    ]


def test_tensorboard_gets_every_figure_and_where_it_is_missing_the_remedy_is_named(run: RunFolder) -> None:
    writer = recorder(run, tensorboard=True)
    writer.row({**ROW, "mfu": None}, 10)
    writer.row({"step": 5, "validation_loss": 2.0})
    writer.close()
    (events,) = (run.path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert [name in content for name in (b"tokens_per_s", b"validation_loss", b"mfu")] == [True, True, False]
    with pytest.raises(ConfigError, match=r"set train\.tensorboard=false"):
        open_tensorboard(run, "not_installed")
