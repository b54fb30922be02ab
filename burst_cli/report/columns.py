"""The table of figures: name, heading, unit, which end of it is better, and how each reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from burst_cli.eval.view import is_evaluation, weights_text
from burst_cli.figures import DASH, binary_bytes, count, duration, percent, plain, rate, seconds, seconds_between
from burst_cli.report.records import Record, is_above_peak, run_name
from cluster.remote_text import one_line
from cluster.values import number, table, text
from engine.config.errors import ConfigError
from engine.config.schema import nearest

ABOVE_PEAK = " !"
Show = Callable[[float | None], str]


@dataclass(frozen=True)
class Column:
    """One figure. key: its name in --columns, --sort and, mostly, in summary.json.

    show: how its number reads; None: it is a text. reads: how the whole record reads, where that is more than the
    number. only_asked: not in tables that do not name it. better: the good end. rank: its place where a terminal is too
    narrow for all; last without.
    """

    key: str
    heading: str
    doc: str = ""
    show: Show | None = None
    reads: Callable[[Record], str] | None = None
    only_asked: bool = False
    better: Literal["higher", "lower"] | None = None
    rank: int = 99

    @property
    def number(self) -> bool:
        """Whether it is aligned like a number."""
        return self.show is not None

    def cell(self, record: Record) -> str:
        """The figure of `record` for people."""
        if self.reads is not None:
            return self.reads(record)
        return self.show(number(record, self.key)) if self.show else text(record, self.key) or DASH


def _spread(name: str, show: Show, ends: tuple[str, str] = ("_p25", "_p75")) -> Callable[[Record], str]:
    """The figure, and the interval around it where its ends are known and differ."""

    def cell(record: Record) -> str:
        middle, low, high = (show(number(record, f"{name}{end}")) for end in ("", *ends))
        return middle if DASH in (middle, low, high) or low == high else f"{middle} ({low}…{high})"

    return cell


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


def _times(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}×"


def _ratio(metric: str, heading: str, rank: int) -> Column:
    key = f"ratio_{metric}"
    return Column(key, heading, "against --baseline", _times, _spread(key, _times, ("_low", "_high")), rank=rank)


def _status(record: Record) -> str:
    status = text(record, "status") or DASH
    return f"{status}, lost" if record.get("lost") else status


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


_SPEED, _MEMORY = "tokens_per_s_per_device", "peak_memory_bytes"
COLUMNS = (
    Column("run", "run", "experiment and run id", reads=run_name, rank=0),
    Column("status", "status", "how it ended, or how far it is", reads=_status, rank=8),
    Column("attention_preset", "attention", "method of attention", rank=6),
    Column("memory_policy", "memory policy", "what is recomputed or moved", rank=9),
    Column("seq_len", "seq_len", "tokens per sequence", _rounded, rank=7),
    Column("world_size", "ranks", "ranks of all nodes", _rounded),
    Column("steps", "steps", "optimizer steps made", _rounded),
    Column(
        _SPEED, "tokens/s/device", "median after warm-up, with quartiles", count, _spread(_SPEED, count),
        better="higher", rank=1,
    ),
    Column(
        "step_time_s", "step time", "median of the slowest rank, with quartiles", seconds, _step_time,
        better="lower", rank=12,
    ),
    Column("predicted_step_time_s", "predicted step", "what `burst plan` expected", seconds, _predicted_step),
    Column("step_time_s_n", "n", "steps behind the medians", _rounded, rank=13),
    Column(
        "mfu", "MFU (causal-aware)", "FLOPs that the mask leaves, against the peak", percent, _share("mfu"),
        better="higher", rank=2,
    ),
    Column(
        "mfu_full_attention", "MFU (full attention)", "FLOPs as if nothing were masked", percent,
        _share("mfu_full_attention"), rank=10,
    ),
    Column("hfu", "HFU", "causal-aware, and what is recomputed", percent, _share("hfu"), rank=15),
    Column(_MEMORY, "peak memory", "largest over ranks", binary_bytes, better="lower", rank=5),
    Column("peak_tensor_bytes", "peak tensors", "live tensors, on a CPU", binary_bytes, better="lower"),
    Column("predicted_peak_bytes", "predicted peak", "what `burst plan` expected", binary_bytes),
    Column("traffic", "sent intra / inter node", "attention bytes of the busiest rank", binary_bytes, _traffic),
    Column("final_train_loss", "train loss", "of the last step", plain, rank=3),
    Column("final_validation_loss", "validation loss", "of the last one", plain, better="lower", rank=14),
    Column("final_validation_bits_per_byte", "bits/byte", "", plain),
    Column("weights", "weights", "whose an evaluation is of", reads=_weights),
    Column("final_needle_accuracy", "needles right", "answers that greedy decoding writes", percent),
    Column("final_needle_gain", "needle gain", "nats per token of the answer that the needle saves", plain),
    Column("peak_flops_per_device", "peak FLOP/s per device", "what MFU is measured against", reads=_peak),
    Column("git_sha", "commit", "of the code that ran", reads=_commit, rank=16),
    Column(
        "started_at", "started (UTC)",
        reads=lambda record: (text(record, "started_at") or DASH)[:16].replace("T", " "),
    ),
    _ratio(_SPEED, "speed", rank=4),
    _ratio(_MEMORY, "memory", rank=11),
    Column("model", "model", only_asked=True),
    Column("hardware", "hardware", "device of the ranks", only_asked=True),
    Column("compute_dtype", "dtype", only_asked=True),
    Column("tokens_per_s", "tokens/s", "all devices together", count, _spread("tokens_per_s", count), only_asked=True),
    Column("peak_host_bytes", "host memory", "", binary_bytes, only_asked=True),
    Column(
        "config_fingerprint", "config", "fingerprint",
        reads=lambda record: (text(record, "config_fingerprint") or DASH)[:12], only_asked=True,
    ),
    Column("versions", "versions", reads=_versions, only_asked=True),
    Column("command", "command", only_asked=True),
    Column("host", "host", "of the launcher", only_asked=True),
    Column("failure_text", "failure", only_asked=True),
    Column("attempts", "attempts", "", _rounded),
    Column("effective_fraction", "effective time", "productive / wall", percent),
    Column("wall_s", "wall", "from the first start on", duration),
    Column("productive_s", "productive", "steps that count", duration),
    Column("start_up_s", "start-up", "before the first step", duration),
    Column("evaluation_s", "evaluation", "", duration),
    Column("checkpoint_stall_s", "checkpoint stall", "", duration),
    Column("lost_work_s", "lost work", "steps made twice", duration),
    Column("restart_s", "restart", "end of an attempt to the next step", duration),
)  # fmt: skip
BY_KEY = {column.key: column for column in COLUMNS}
UNASKED = tuple(column for column in COLUMNS if not column.only_asked)
PAPER_KEYS = (
    "attention_preset", "memory_policy", "seq_len", _SPEED, "mfu", "mfu_full_attention", _MEMORY,
    "final_needle_accuracy", "final_needle_gain", f"ratio_{_SPEED}", f"ratio_{_MEMORY}",
)  # fmt: skip
PROVENANCE_KEYS = (
    "run", "started_at", "git_sha", "config_fingerprint", "hardware", "host", "versions", "command", "failure_text",
)  # fmt: skip
NOTES = (
    "tokens/s and step time: median (p25…p75) over the n optimizer steps after warm-up. Sent bytes: attention messages "
    "of the busiest rank in one step.",
    "MFU (causal-aware) counts the FLOPs that the mask leaves; MFU (full attention) counts the whole square, as most "
    "papers do; HFU adds what is recomputed.",
)
ABOVE_PEAK_NOTE = (
    "!: above the peak of the device, which cannot be: its peak or the timing is wrong, and no figure of that run can "
    "be trusted."
)
# Names that people type for keys that are longer.
ALIASES = {"attention": "attention_preset", "policy": "memory_policy", "ranks": "world_size", "commit": "git_sha"}


def choose_columns(names: Sequence[str]) -> tuple[Column, ...]:
    """The columns of --columns, in that order. Raises ConfigError with every unknown name and the nearest ones."""
    wanted = [ALIASES.get(name, name) for entry in names for name in entry.replace(" ", "").split(",") if name]
    problems = [unknown_column("--columns", name) for name in wanted if name not in BY_KEY]
    problems += [] if wanted else ["--columns names no column; `--columns help` lists all"]
    if problems:
        raise ConfigError(problems)
    return tuple(BY_KEY[name] for name in dict.fromkeys(wanted))


def unknown_column(option: str, name: str) -> str:
    """What to say of a name that no column has."""
    near = nearest(name, [*BY_KEY, *ALIASES])
    return f"{option}: there is no {name!r}; {f'did you mean {near}? ' if near else ''}`--columns help` lists all"


def column_help() -> str:
    """Every column that can be chosen, a line each."""
    wide = max(len(column.key) for column in COLUMNS)
    rows = [f"  {c.key:{wide}}  {c.heading}{f': {c.doc}' if c.doc else ''}" for c in COLUMNS]
    return "\n".join(["Columns for --columns (comma-separated) and --sort:", *rows]) + "\n"


def filled(columns: Sequence[Column], records: Sequence[Record]) -> tuple[Column, ...]:
    """`columns` without those that are empty in all records."""
    return tuple(c for c in columns if any(c.cell(record).strip(f"{DASH} /") for record in records))


def notes_for(records: Iterable[Record]) -> tuple[str, ...]:
    """What must be read below these records."""
    return (*NOTES, ABOVE_PEAK_NOTE) if any(map(is_above_peak, records)) else NOTES
