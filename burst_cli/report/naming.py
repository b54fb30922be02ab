"""By what the runs of a report differ: their settings, their data, and a name for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from burst_cli.render import grouped
from burst_cli.report.records import Record, method_of, tokens
from burst_cli.runs.read import read_table
from cluster.remote_text import one_line, table, text, whole

Settings = Mapping[str, str]
_VALUE_CHARACTERS = 40
_MOST_SETTINGS = 3  # in a table; a curve that differs by more is named by its run
# Settings that a report shows in columns or titles already, and those that change no figure.
_SHOWN = ("exp", "attention.preset", "train.seq_len", "data.", "cluster.", "memory.device_bytes", "memory.host_bytes")
_POLICY = ("activation_", "checkpoint_layers", "saved_fraction", "every_layers", "host_layers", "tile_tokens")
_WITHOUT_EFFECT = ("train.checkpoint.", "train.tensorboard", "train.profile", "train.peak_flops_per_device")
_UNNAMED = (*_SHOWN, *(f"memory.{name}" for name in (*_POLICY, "optimizer_store")), *_WITHOUT_EFFECT)
# What changes losses, but not how long a step takes or how much memory it needs.
_OF_LOSSES = ("optimizer.", "seed", "train.steps", "train.eval", "train.guard.", "model.init_", "loss.z_loss")


# --- settings ---------------------------------------------------------------------------------------------------------


def read_settings(run_path: Path) -> dict[str, str]:
    """{dotted name: value in words} of RUN/config.yaml; empty where that cannot be read."""
    return dict(_flat(read_table(run_path / "config.yaml"), ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _words(value)


def _words(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def differences(all_settings: Sequence[Settings], *, unnamed: Sequence[str] = _UNNAMED) -> list[dict[str, str]]:
    """For each of these the settings in which not all are equal, each under as much of its name as is unambiguous.

    unnamed: how names begin that are passed over. Settings that are not known differ from none.
    """
    names = dict.fromkeys(name for settings in all_settings for name in settings if not name.startswith(tuple(unnamed)))
    differing = [name for name in names if len({s[name] for s in all_settings if name in s}) > 1]
    lasts = [name.rpartition(".")[2] for name in differing]
    shown = {name: last if lasts.count(last) == 1 else name for name, last in zip(differing, lasts, strict=True)}
    return [{shown[name]: settings[name] for name in differing if name in settings} for settings in all_settings]


def in_words(values: Settings, most: int = _MOST_SETTINGS) -> str:
    """`learning_rate=0.001 weight_decay=0`, and how many more there are."""
    parts = [f"{one_line(name)}={one_line(value, _VALUE_CHARACTERS)}" for name, value in values.items()]
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return " ".join(parts[:most]) + more


def settings_of(record: Record) -> Settings:
    """Those that `read_record` found; of a cell without a run those that it was to have."""
    return table(record, "settings")


def with_differences(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`records` of one group with `differs`: by which settings; cells of a sweep say that themselves."""
    for record, values in zip(records, differences([settings_of(record) for record in records]), strict=True):
        if values and record.get("cell_values") is None:
            record["differs"] = in_words(values)
    return list(records)


# --- data -------------------------------------------------------------------------------------------------------------


def data_keys(records: Sequence[Record]) -> list[str | None]:
    """What tells the data of each record from that of others; None where nothing is known of it.

    The hash of the tokens that the ranks read. Of a run that has none (it failed, or still runs) that of the runs with
    the same settings of data where those all read the same, else a digest of its settings.
    """
    pairs = [(text(record, "data_fingerprint"), text(record, "data_content_hash")) for record in records]
    known = grouped((settings, tokens) for settings, tokens in pairs if settings and tokens)

    def key(settings: str | None, tokens: str | None) -> str | None:
        same = set(known.get(settings or "", ()))
        return tokens or (same.pop() if len(same) == 1 else settings)

    return [key(*pair) for pair in pairs]


def data_names(groups: Sequence[Sequence[Record]]) -> list[str]:
    """A name for the data of each of these groups, all of which differ in it: by their settings, else by their hash."""
    firsts = [next((settings for record in group if (settings := settings_of(record))), {}) for group in groups]
    of_data = [{name: value for name, value in settings.items() if name.startswith("data.")} for settings in firsts]
    found = []
    for group, values in zip(groups, differences(of_data, unnamed=("data.prepared_dir",)), strict=True):
        digest = next((one for record in group if (one := text(record, "data_content_hash"))), None)
        found.append(in_words(values) or (f"data {digest[:8]}" if digest else "data unknown"))
    return found


# --- names of curves and points ---------------------------------------------------------------------------------------


def speed_names(records: Sequence[Record]) -> list[str | None]:
    """The line of each record in pictures of speed and memory: its method, and settings that change how long a step
    takes. None where the method is not known."""
    ignored = (*_UNNAMED, *_OF_LOSSES)
    differing = differences([settings_of(record) for record in records], unnamed=ignored)
    return [
        method and " ".join(filter(None, [method, in_words(values)]))
        for method, values in zip(map(method_of, records), differing, strict=True)
    ]


def newest_of_each(records: Sequence[Record]) -> dict[str, Record]:
    """{name: run}, for every configuration its newest run; `records`: the oldest first.

    The name is method and length, where they differ, and what else does; of what differs by many settings the run.
    """
    differing = differences([settings_of(record) for record in records])
    bases = [_method_and_length(record) for record in records]
    newest: dict[tuple[str, ...], tuple[str, Record]] = {}
    for record, base, values in zip(records, bases, differing, strict=True):
        key = (base, *(f"{name}={value}" for name, value in values.items()))
        newest.pop(key, None)
        many = f"run {str(record.get('run_id'))[-6:]}" if len(values) > _MOST_SETTINGS else in_words(values)
        newest[key] = (many if many and len(set(bases)) == 1 else f"{base} {many}".rstrip()), record
    names: dict[str, Record] = {}
    for name, record in newest.values():  # values cut to a width may be alike
        names[name if name not in names else f"{name} {str(record.get('run_id'))[-6:]}"] = record
    return names


def _method_and_length(record: Record) -> str:
    length = whole(record, "seq_len")
    return f"{method_of(record) or '?'} {tokens(length) if length else '?'}"
