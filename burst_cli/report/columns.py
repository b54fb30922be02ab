"""The table of figures: name, heading, unit, which end of it is better, and how each reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from burst_cli.report.records import Record, is_above_peak, is_in_progress, run_name
from burst_cli.runs.evaluation import weights_text
from burst_cli.runs.read import is_evaluation
from cluster.remote_text import number, one_line, table, text
from engine.runs.figures import DASH, binary_bytes, count, duration, percent, plain, rate, seconds, seconds_between

ABOVE_PEAK = " !"
Show = Callable[[float | None], str]


@dataclass(frozen=True)
class Column:
    """One figure. key: its name, mostly that in summary.json.

    show: how its number reads; None: it is a text. reads: how the whole record reads, where that is more than the
    number. rank: its place where a terminal is too narrow for all; last without.
    """

    key: str
    heading: str
    show: Show | None = None
    reads: Callable[[Record], str] | None = None
    is_higher_better: bool = False
    rank: int = 99

    def cell(self, record: Record) -> str:
        """The figure of `record` for people."""
        if self.reads is not None:
            return self.reads(record)
        return self.show(number(record, self.key)) if self.show else text(record, self.key) or DASH


def _speed(record: Record) -> str:
    """With the interval of its quartiles, where they are known and differ."""
    middle, low, high = (count(number(record, f"{_SPEED}{end}")) for end in ("", "_p25", "_p75"))
    return middle if DASH in (middle, low, high) or low == high else f"{middle} ({low}…{high})"


def _step_time(record: Record) -> str:
    middle, low, high = (number(record, f"step_time_s{suffix}") for suffix in ("", "_p25", "_p75"))
    if middle is None or low is None or high is None or low == high:
        return seconds(middle)
    return seconds_between(middle, low, high)


def _predicted_step(record: Record) -> str:
    """With the machine whose rates it is of."""
    figure, machine = seconds(number(record, "predicted_step_time_s")), text(record, "predicted_step_machine")
    return figure if figure == DASH or not machine else f"{figure} on {machine}"


def _share(name: str) -> Callable[[Record], str]:
    """A share of the device's peak, marked when it lies above it."""

    def cell(record: Record) -> str:
        value = number(record, name)
        return percent(value) + (ABOVE_PEAK if value is not None and value > 1 and is_above_peak(record) else "")

    return cell


def _status(record: Record) -> str:
    status = text(record, "status") or DASH
    return f"{status}, lost" if record.get("lost") else status


def _progress(record: Record) -> str:
    """The steps of an ended run; of one in progress how many of how many: `30 / 120 (25%)`."""
    done, planned = number(record, "steps"), number(record, "planned_steps")
    if not is_in_progress(record) or not planned:
        return _rounded(done)
    return f"{done or 0:,.0f} / {planned:,.0f} ({percent((done or 0) / planned)})"


def _differs(record: Record) -> str:
    """What a sweep set for this cell; elsewhere the settings that not all runs of the group share."""
    return text(record, "cell_values") or text(record, "differs") or DASH


def _traffic(record: Record) -> str:
    return " / ".join(binary_bytes(number(record, f"comm_{link}_bytes")) for link in ("intra", "inter"))


def _peak(record: Record) -> str:
    figure, source = rate(number(record, "peak_flops_per_device"), "FLOP/s"), text(record, "peak_flops_source")
    return figure if figure == DASH or not source else f"{figure}, {source}"


def _weights(record: Record) -> str:
    return one_line(weights_text(record)).removeprefix("weights of ") if is_evaluation(record) else DASH


def _commit(record: Record) -> str:
    sha = text(record, "git_sha")
    return DASH if sha is None else f"{sha[:10]}{' + changes' if record.get('dirty') else ''}"


def _versions(record: Record) -> str:
    return ", ".join(one_line(f"{name} {value}") for name, value in table(record, "versions").items()) or DASH


def _rounded(value: float | None) -> str:
    return plain(value, 0)


_SPEED = "tokens_per_s_per_device"
_RUN = Column("run", "run", reads=run_name, rank=0)
_COMMIT = Column("git_sha", "commit", reads=_commit, rank=16)
_STARTED = Column(
    "started_at", "started (UTC)", reads=lambda record: (text(record, "started_at") or DASH)[:16].replace("T", " ")
)
COLUMNS = (
    _RUN,
    Column("differs", "differs by", reads=_differs, rank=0),
    Column("status", "status", reads=_status, rank=4),
    Column("steps", "steps", _rounded, _progress),
    Column(_SPEED, "tokens/s/device", count, _speed, is_higher_better=True, rank=1),
    Column("mfu", "MFU (causal-aware)", percent, _share("mfu"), is_higher_better=True, rank=2),
    Column("final_train_loss", "train loss", plain, rank=3),
    Column("final_validation_loss", "validation loss", plain, rank=14),
    Column("attention_preset", "attention", rank=6),
    Column("memory_policy", "memory policy", rank=9),
    Column("seq_len", "seq_len", _rounded, rank=7),
    Column("world_size", "ranks", _rounded),
    Column("step_time_s", "step time", seconds, _step_time, rank=12),
    Column("predicted_step_time_s", "predicted step", seconds, _predicted_step),
    Column("step_time_s_n", "n", _rounded, rank=13),
    Column("mfu_full_attention", "MFU (full attention)", percent, _share("mfu_full_attention"), rank=10),
    Column("hfu", "HFU", percent, _share("hfu"), rank=15),
    Column("peak_memory_bytes", "peak memory", binary_bytes, rank=5),
    Column("peak_tensor_bytes", "peak tensors", binary_bytes),
    Column("predicted_peak_bytes", "predicted peak", binary_bytes),
    Column("traffic", "sent intra / inter node", binary_bytes, _traffic),
    Column("final_validation_bits_per_byte", "bits/byte", plain),
    Column("weights", "weights", reads=_weights),
    Column("final_needle_accuracy", "needles right", percent),
    Column("final_needle_gain", "needle gain", plain),
    Column("peak_flops_per_device", "peak FLOP/s per device", reads=_peak),
    _COMMIT,
    _STARTED,
    Column("attempts", "attempts", _rounded),
    Column("effective_fraction", "effective time", percent),
    Column("wall_s", "wall", duration),
    Column("productive_s", "productive", duration),
    Column("start_up_s", "start-up", duration),
    Column("evaluation_s", "evaluation", duration),
    Column("checkpoint_stall_s", "checkpoint stall", duration),
    Column("lost_work_s", "lost work", duration),
    Column("restart_s", "restart", duration),
)
BY_KEY = {column.key: column for column in COLUMNS}
PROVENANCE = (
    _RUN,
    _STARTED,
    _COMMIT,
    Column("config_fingerprint", "config", reads=lambda record: (text(record, "config_fingerprint") or DASH)[:12]),
    Column("hardware", "hardware"),
    Column("host", "host"),
    Column("versions", "versions", reads=_versions),
    Column("command", "command"),
    Column("failure_text", "failure"),
)
_NOTES = (
    "tokens/s and step time: median (p25…p75) over the n optimizer steps after warm-up. Sent bytes: attention messages "
    "of the busiest rank in one step.",
    "MFU (causal-aware) counts the FLOPs that the mask leaves; MFU (full attention) counts the whole square, as most "
    "papers do; HFU adds what is recomputed.",
)
_ABOVE_PEAK_NOTE = (
    "!: above the peak of the device, which cannot be: its peak or the timing is wrong, and no figure of that run can "
    "be trusted."
)


def filled(columns: Sequence[Column], records: Sequence[Record]) -> tuple[Column, ...]:
    """`columns` without those that are empty in all records."""
    return tuple(c for c in columns if any(c.cell(record).strip(f"{DASH} /") for record in records))


def notes_for(records: Iterable[Record]) -> tuple[str, ...]:
    """What must be read below these records."""
    return (*_NOTES, _ABOVE_PEAK_NOTE) if any(map(is_above_peak, records)) else _NOTES
