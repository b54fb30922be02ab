"""The figures that a report can show: name to type, heading, and how each reads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from burst_cli.evaluation_view import is_evaluation, weights_text
from burst_cli.figures import DASH, binary_bytes, count, duration, flops_per_s, percent, plain, seconds, seconds_between
from burst_cli.report.values import Record, is_above_peak, number, one_line, run_name, text
from engine.config_schema import nearest
from engine.errors import ConfigError

ABOVE_PEAK = " !"
Show = Callable[[float | None], str]
Cell = Callable[[Record], str]


@dataclass(frozen=True)
class Column:
    """One figure. key: its name in --columns, --sort and, mostly, in summary.json. default: shown unasked."""

    key: str
    heading: str
    doc: str
    cell: Cell
    number: bool = True
    default: bool = True


def _number(name: str, show: Show) -> Cell:
    return lambda record: show(number(record, name))


def _median(name: str, show: Show) -> Cell:
    """The median, and the quartiles where the steps differ."""

    def cell(record: Record) -> str:
        middle, low, high = (show(number(record, f"{name}{suffix}")) for suffix in ("", "_p25", "_p75"))
        return middle if middle == DASH or DASH in (low, high) or low == high else f"{middle} ({low}…{high})"

    return cell


def _step_time(record: Record) -> str:
    middle, low, high = (number(record, f"step_time_s{suffix}") for suffix in ("", "_p25", "_p75"))
    return seconds(middle) if middle is None or low is None or low == high else seconds_between(middle, low, high or 0)


def _share(name: str) -> Cell:
    """A share of the device's peak, marked when it lies above it."""

    def cell(record: Record) -> str:
        value = number(record, name)
        return percent(value) + (ABOVE_PEAK if value is not None and value > 1 and is_above_peak(record) else "")

    return cell


def _text(name: str, most: int | None = None) -> Cell:
    return lambda record: DASH if (value := text(record, name)) is None else value[:most]


def _ratio(name: str) -> Cell:
    """A ratio with the interval that its quartiles span."""

    def cell(record: Record) -> str:
        middle, low, high = (number(record, f"ratio_{name}{suffix}") for suffix in ("", "_low", "_high"))
        if middle is None:
            return DASH
        return f"{middle:.3g}×" if low is None or high is None else f"{middle:.3g}× ({low:.3g}…{high:.3g})"

    return cell


def _status(record: Record) -> str:
    status = text(record, "status") or DASH
    return f"{status}, lost" if record.get("alive") is False else status


def _traffic(record: Record) -> str:
    intra, inter = (binary_bytes(number(record, f"comm_{link}_bytes")) for link in ("intra", "inter"))
    return f"{intra} / {inter}"


def _peak(record: Record) -> str:
    figure, source = flops_per_s(number(record, "peak_flops_per_device")), text(record, "peak_flops_source")
    return figure if figure == DASH or not source else f"{figure}, {source}"


def _weights(record: Record) -> str:
    return one_line(weights_text(record)).removeprefix("weights of ") if is_evaluation(record) else DASH


def _commit(record: Record) -> str:
    sha = text(record, "git_sha")
    return DASH if sha is None else f"{sha[:10]}{' + changes' if record.get('dirty') else ''}"


def _started(record: Record) -> str:
    moment = text(record, "started_at")
    return DASH if moment is None else moment[:16].replace("T", " ")


def _versions(record: Record) -> str:
    found = record.get("versions")
    return ", ".join(one_line(f"{name} {value}") for name, value in found.items()) if isinstance(found, dict) else DASH


COLUMNS = (
    Column("run", "run", "experiment and run id", run_name, number=False),
    Column("status", "status", "how it ended, or how far it is", _status, number=False),
    Column("attention_preset", "attention", "method of attention", _text("attention_preset"), number=False),
    Column("memory_policy", "memory policy", "what is recomputed or moved", _text("memory_policy"), number=False),
    Column("seq_len", "seq_len", "tokens per sequence", _text("seq_len")),
    Column("world_size", "ranks", "ranks of all nodes", _text("world_size")),
    Column("steps", "steps", "optimizer steps made", _text("steps")),
    Column(
        "tokens_per_s_per_device",
        "tokens/s/device",
        "median after warm-up, with quartiles",
        _median("tokens_per_s_per_device", count),
    ),
    Column("step_time_s", "step time", "median of the slowest rank, with quartiles", _step_time),
    Column(
        "step_time_s_n", "n", "steps behind the medians", _number("step_time_s_n", lambda v: plain(v, 0)), default=True
    ),
    Column("mfu", "MFU (causal-aware)", "FLOPs that the mask leaves, against the peak", _share("mfu")),
    Column(
        "mfu_full_attention", "MFU (full attention)", "FLOPs as if nothing were masked", _share("mfu_full_attention")
    ),
    Column("hfu", "HFU", "causal-aware, and what is recomputed", _share("hfu")),
    Column("peak_memory_bytes", "peak memory", "largest over ranks", _number("peak_memory_bytes", binary_bytes)),
    Column("peak_tensor_bytes", "peak tensors", "live tensors, on a CPU", _number("peak_tensor_bytes", binary_bytes)),
    Column(
        "predicted_peak_bytes",
        "predicted peak",
        "what `burst plan` expected",
        _number("predicted_peak_bytes", binary_bytes),
    ),
    Column("traffic", "sent intra / inter node", "attention bytes of the busiest rank in a step", _traffic),
    Column("final_train_loss", "train loss", "of the last step", _number("final_train_loss", plain)),
    Column("final_validation_loss", "validation loss", "of the last one", _number("final_validation_loss", plain)),
    Column("final_validation_bits_per_byte", "bits/byte", "", _number("final_validation_bits_per_byte", plain)),
    Column("peak_flops_per_device", "peak FLOP/s per device", "what MFU is measured against", _peak, number=False),
    Column("git_sha", "commit", "of the code that ran", _commit, number=False),
    Column("started_at", "started (UTC)", "", _started, number=False),
    Column("ratio_tokens_per_s_per_device", "speed", "against --baseline", _ratio("tokens_per_s_per_device")),
    Column("ratio_peak_memory_bytes", "memory", "against --baseline", _ratio("peak_memory_bytes")),
    Column("weights", "weights", "whose an evaluation is of", _weights, number=False, default=False),
    Column(
        "final_needle_accuracy",
        "needles right",
        "answers that greedy decoding writes",
        _number("final_needle_accuracy", percent),
        default=False,
    ),
    Column(
        "final_needle_gain",
        "needle gain",
        "nats per token of the answer that the needle saves",
        _number("final_needle_gain", plain),
        default=False,
    ),
    Column("model", "model", "", _text("model"), number=False, default=False),
    Column("hardware", "hardware", "device of the ranks", _text("hardware"), number=False, default=False),
    Column("compute_dtype", "dtype", "", _text("compute_dtype"), number=False, default=False),
    Column("tokens_per_s", "tokens/s", "all devices together", _median("tokens_per_s", count), default=False),
    Column("peak_host_bytes", "host memory", "", _number("peak_host_bytes", binary_bytes), default=False),
    Column("config_fingerprint", "config", "fingerprint", _text("config_fingerprint", 12), number=False, default=False),
    Column("versions", "versions", "", _versions, number=False, default=False),
    Column("command", "command", "", _text("command"), number=False, default=False),
    Column("host", "host", "of the launcher", _text("host"), number=False, default=False),
    Column("failure_text", "failure", "", _text("failure_text"), number=False, default=False),
    Column("attempts", "attempts", "", _text("attempts"), default=False),
    Column(
        "effective_fraction",
        "effective time",
        "productive / wall",
        _number("effective_fraction", percent),
        default=False,
    ),
    Column("wall_s", "wall", "from the first start on", _number("wall_s", duration), default=False),
    Column("productive_s", "productive", "steps that count", _number("productive_s", duration), default=False),
    Column("start_up_s", "start-up", "before the first step", _number("start_up_s", duration), default=False),
    Column("evaluation_s", "evaluation", "", _number("evaluation_s", duration), default=False),
    Column("checkpoint_stall_s", "checkpoint stall", "", _number("checkpoint_stall_s", duration), default=False),
    Column("lost_work_s", "lost work", "steps made twice", _number("lost_work_s", duration), default=False),
    Column("restart_s", "restart", "end of an attempt to the next step", _number("restart_s", duration), default=False),
)
EVALUATION_KEYS = ("weights", "final_needle_accuracy", "final_needle_gain")
EFFECTIVE_KEYS = (
    "attempts",
    "effective_fraction",
    "wall_s",
    "productive_s",
    "start_up_s",
    "evaluation_s",
    "checkpoint_stall_s",
    "lost_work_s",
    "restart_s",
)
# What a terminal that is too narrow for all columns shows first; both conventions of MFU stay together.
FIRST_KEYS = (
    "run",
    "tokens_per_s_per_device",
    "mfu",
    "final_train_loss",
    "ratio_tokens_per_s_per_device",
    "peak_memory_bytes",
    "attention_preset",
    "seq_len",
    "status",
    "memory_policy",
    "mfu_full_attention",
    "ratio_peak_memory_bytes",
    "step_time_s",
    "step_time_s_n",
    "final_validation_loss",
    "hfu",
    "git_sha",
)
BASELINE_KEYS = ("ratio_tokens_per_s_per_device", "ratio_peak_memory_bytes")
PROVENANCE_KEYS = (
    "run",
    "started_at",
    "git_sha",
    "config_fingerprint",
    "hardware",
    "host",
    "versions",
    "command",
)
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
BY_KEY = {column.key: column for column in COLUMNS}
# Names that people type for keys that are longer.
ALIASES = {"attention": "attention_preset", "policy": "memory_policy", "ranks": "world_size", "commit": "git_sha"}


def default_columns(*, baseline: bool, effective: bool, records: Sequence[Record] = ()) -> tuple[Column, ...]:
    """The columns of a report that was not asked for special ones; those of evaluations if `records` have any."""
    kept = [column for column in COLUMNS if column.default and (baseline or column.key not in BASELINE_KEYS)]
    if effective:
        kept += [column for column in COLUMNS if column.key in EFFECTIVE_KEYS]
    evaluation = filled([BY_KEY[key] for key in EVALUATION_KEYS], records)
    place = 1 + [column.key for column in kept].index("final_validation_bits_per_byte")
    return (*kept[:place], *evaluation, *kept[place:])


def choose_columns(names: Sequence[str]) -> tuple[Column, ...]:
    """The columns of --columns, in that order. Raises ConfigError with every unknown name and the nearest ones."""
    wanted = [ALIASES.get(name, name) for entry in names for name in entry.replace(" ", "").split(",") if name]
    problems = [unknown_column("--columns", name) for name in wanted if name not in BY_KEY]
    if problems:
        raise ConfigError(problems)
    return tuple(BY_KEY[name] for name in dict.fromkeys(wanted))


def unknown_column(option: str, name: str, known: Iterable[str] = BY_KEY) -> str:
    """What to say of a name that no column has."""
    near = nearest(name, [*known, *ALIASES])
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
