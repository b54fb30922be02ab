"""Dataclasses as a schema: settings with notes, and plain values read with all mistakes reported together.

Standard library only. Knows nothing of the settings themselves; `engine.config.settings` declares those.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from engine.config.hints import meant_value, synonym

_NOTE = "note"
_JSON_WORDS = "a table of JSON values"
_T = TypeVar("_T")
_SBATCH = "name it in cluster.slurm.options, such as --{}"
_RATE = "name it in cluster.machine.rates, such as {}=25e9"
_RELEASED = "it is {} in all released models"
# Settings of earlier versions: the value with which files of earlier runs are still read (...: any), and what replaces
# other values.
_REMOVED: dict[str, tuple[Any, str]] = {
    "cluster.name": (..., "the file under conf/cluster/ has the name"),
    "cluster.expected.driver": (None, "`burst check-nodes` compares the drivers of the nodes"),
    "cluster.ssh.fan_out": (64, "64 nodes are spoken to at the same time"),
    **{
        f"cluster.machine.{name}": (None, _RATE.format(name))
        for name in (
            *("forward_flops_per_s", "backward_flops_per_s", "shared_nic"),
            *("intra_bytes_per_s", "inter_bytes_per_s", "host_bytes_per_s"),
        )
    },
    **{
        f"cluster.slurm.{name}": (None, _SBATCH.format(f"{name}=..."))
        for name in ("partition", "account", "qos", "constraint", "exclude")
    },
    "cluster.slurm.cpus_per_node": (None, _SBATCH.format("cpus-per-task=N")),
    "data.bos=on": (None, "data.bos=auto takes the template (post_processor) in tokenizer.json: add the token there"),
    "model.rope_scaling.attention_factor": (None, "it is 0.1 ln(model.rope_scaling.factor) + 1"),
    "model.rope_scaling.beta_fast": (32.0, _RELEASED.format(32)),
    "model.rope_scaling.beta_slow": (1.0, _RELEASED.format(1)),
    "model.rope_scaling.low_freq_factor": (1.0, _RELEASED.format(1)),
    "model.rope_scaling.high_freq_factor": (4.0, _RELEASED.format(4)),
    "parallel.reshard_after_forward": (True, "gathered weights are always freed after the forward pass"),
    "train.checkpoint.keep_every_steps": (
        None,
        "`burst checkpoint prune --keep-every 1000` leaves those of a larger keep_last",
    ),
    "train.guard.most_in_a_row": (5, "a run stops after 5 dropped steps without progress"),
    "train.guard.window_steps": (64, "a loss is compared with those of the last 64 steps"),
    "train.log_interval_steps": (1, "every step has its line"),
    "train.warmup_metric_steps": (3, "medians leave the first 3 steps out"),
}
_INT_LIMIT = 2**63  # tensors hold no greater number
# YAML 1.1, which PyYAML reads, takes 1e-4 for text because it has no dot.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([KkMm])")


@dataclass(frozen=True)
class Note:
    """Documentation of a field: its meaning, its unit and its bounds."""

    doc: str
    unit: str | None = None
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def bounds(self) -> str:
        """The bounds in words, `0 or more, below 1`; empty without bounds."""
        low = _bound("more than {}", self.above) or _bound("{} or more", self.at_least)
        high = _bound("below {}", self.below) or _bound("at most {}", self.at_most)
        return ", ".join(part for part in (low, high) if part)

    def admits(self, number: float) -> bool:
        """Return whether the number is within the bounds (NaN and infinity never are)."""
        return (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.at_least is None or number >= self.at_least)
            and (self.below is None or number < self.below)
            and (self.at_most is None or number <= self.at_most)
        )


def _bound(words: str, number: float | None) -> str:
    return "" if number is None else words.format(f"{number:g}")


def setting(default: Any, doc: str, unit: str | None = None, **bounds: float) -> Any:
    """Declare a field as a setting: `batch_size: int = setting(1, "per rank", "sequences", at_least=1)`."""
    return field(default=default, metadata={_NOTE: Note(doc, unit, **bounds)})


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration: its dotted keys and a sentence."""

    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Written:
    """Where and how a value was written.

    text    of a number, a truth value or null, as it was written; None for text, whose value is the text itself
    file    as a person knows it; empty for an override on the command line
    line    of the file, from 1
    """

    text: str | None
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class FieldSpec:
    """One setting: its dotted key, type in words, default, legal values (None: not a choice) and note."""

    key: str
    type_text: str
    default: Any
    choices: tuple[str, ...] | None
    note: Note

    @property
    def is_json(self) -> bool:
        """Whether it is a table whose keys are not settings."""
        return _JSON_WORDS in self.type_text

    def legal_values(self) -> tuple[str, ...]:
        """Return all values as typed if there are finitely many; else nothing."""
        if self.choices is None:
            return ("true", "false") if self.type_text == _TYPE_WORDS[bool] else ()
        return (*self.choices, "null") if self.type_text.endswith(" or null") else self.choices


def _cached(function: Callable[[type[Any]], _T]) -> Callable[[type[Any]], _T]:
    """`functools.cache` with the function's signature, since type checkers assume that classes are not hashable."""
    return cast(Callable[[type[Any]], _T], functools.cache(function))


@_cached
def type_hints(cls: type[Any]) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name; cached, since it takes a millisecond."""
    return get_type_hints(cls)


def _walk(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield dotted key, type and field of a tree of dataclasses, in order of declaration."""
    hints = type_hints(cls)
    for item in fields(cls):
        key, annotation = f"{prefix}{item.name}", hints[item.name]
        yield key, annotation, item
        if is_dataclass(annotation) and isinstance(annotation, type):
            yield from _walk(annotation, f"{key}.")


def walk_fields(cls: type[Any]) -> Iterator[FieldSpec]:
    """Return every leaf setting of a tree of dataclasses, in order of declaration."""
    for key, annotation, item in _walk(cls):
        if not is_dataclass(annotation):
            default = None if item.default is MISSING else item.default
            yield FieldSpec(key, describe_type(annotation), default, choices_of(annotation), note_of(item))


def walk_sections(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """Return dotted key and first docstring line of every nested dataclass, in order of declaration."""
    for key, annotation, _ in _walk(cls):
        if is_dataclass(annotation):
            yield key, (annotation.__doc__ or "").strip().splitlines()[0]


@_cached
def known_keys(cls: type[Any]) -> tuple[str, ...]:
    """Return every dotted key: sections and settings."""
    return (*(key for key, _ in walk_sections(cls)), *(spec.key for spec in walk_fields(cls)))


def note_of(item: Field[Any]) -> Note:
    """Return the note of a dataclass field, an empty one if it has none."""
    found = item.metadata.get(_NOTE)
    return found if isinstance(found, Note) else Note("")


def choices_of(annotation: Any) -> tuple[str, ...] | None:
    """Return the legal values of a choice, None for other types."""
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in get_args(annotation))
    found = [choices_of(member) for member in union_members(annotation) if member is not annotation]
    return tuple(choice for choices in found if choices is not None for choice in choices) or None


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union; the type itself for others."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


class JsonObject(Mapping[str, Any]):
    """An immutable JSON object, hashable by its canonical text; a setting whose keys are not ours to list."""

    def __init__(self, value: Mapping[str, Any] | None = None) -> None:
        """Copy `value`. Raises TypeError or ValueError for what JSON cannot hold."""
        self._text = json.dumps(to_plain(value or {}), sort_keys=True, allow_nan=False)
        self._items: dict[str, Any] = json.loads(self._text)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonObject) and self._text == other._text

    def __repr__(self) -> str:
        return f"JsonObject({self._text})"


_TYPE_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def describe_type(annotation: Any) -> str:
    """Describe a type in words without Python's terms."""
    members = union_members(annotation)
    if len(members) > 1:
        return " or ".join(describe_type(member) for member in members)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list, each item " + describe_type(get_args(annotation)[0])
    if is_dataclass(annotation):
        return "a table of settings"
    if annotation is JsonObject:
        return _JSON_WORDS
    return _TYPE_WORDS.get(annotation, str(annotation))


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the most similar word, None if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def nearest_key(key: str, keys: Sequence[str]) -> str | None:
    """Return the most similar key: the same name elsewhere, a similar name in the same section, or a similar key."""
    section, _, name = key.rpartition(".")
    split = [(candidate.rpartition(".")[0], candidate.rpartition(".")[2], candidate) for candidate in keys]
    same_name = [candidate for _, tail, candidate in split if tail == name]
    same_name = same_name or [candidate for _, tail, candidate in split if tail.replace("_", "") == name]
    if same_name:
        return nearest(key, same_name) or same_name[0]
    own = {tail: candidate for place, tail, candidate in split if place == section}
    if near := nearest(name, own):
        return own[near]
    if section and own:
        return None
    anywhere = {tail: candidate for _, tail, candidate in reversed(split)}
    near = nearest(name, anywhere)
    return nearest(key, keys) or (anywhere[near] if near else None)


def unknown_key(key: str, keys: Sequence[str]) -> Problem:
    """Return the problem of an unknown setting, with the nearest existing one, or all of its section."""
    if key in _REMOVED:
        return Problem((key,), f"{key}: no such setting any more; {_REMOVED[key][1]}")
    is_name_here = any(known.rpartition(".")[2] == key.rpartition(".")[2] for known in keys)
    if not is_name_here and (hint := synonym(key)) is not None:
        return Problem((key,), f"{key}: no such setting; {hint}")
    if key in keys:
        section, _, name = key.rpartition(".")
        return Problem((key,), f"{key}: a key of a file has no dots; write `{section}: {{{name}: ...}}`")
    section = key.rpartition(".")[0]
    near = nearest_key(key, [candidate for candidate in keys if candidate != section])
    beside = [candidate.rpartition(".")[2] for candidate in keys if candidate.rpartition(".")[0] == section]
    if near:
        return Problem((key,), f"{key}: no such setting; did you mean {near}?")
    has = f"{section} has {', '.join(beside)}" if section and beside else "`burst config --fields` lists every setting"
    return Problem((key,), f"{key}: no such setting; {has}")


@dataclass(frozen=True)
class _Reader:
    """Reads plain values into dataclasses; mistakes are added to `problems` and replaced by the default."""

    problems: list[Problem]
    all_keys: tuple[str, ...]
    written: Mapping[str, Written]

    def table(self, cls: type[Any], value: Any, prefix: str) -> Any:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self._wrong(prefix.rstrip(".") or "configuration", "a table of settings", value)
            return cls()
        hints = type_hints(cls)
        for name, given in value.items():
            if name not in hints and _REMOVED.get(f"{prefix}{name}", (MISSING,))[0] not in (given, ...):
                self.problems.append(unknown_key(f"{prefix}{name}", self.all_keys))
        read: dict[str, Any] = {}
        for item in fields(cls):
            if item.name in value:
                unit = note_of(item).unit
                given = tokens_of(value[item.name]) if unit == "tokens" else value[item.name]
                read[item.name] = self.value(hints[item.name], given, f"{prefix}{item.name}", unit)
        return cls(**{name: result for name, result in read.items() if result is not MISSING})

    def value(self, annotation: Any, value: Any, key: str, unit: str | None = None) -> Any:
        """Return the value as this type, MISSING for a mistake."""
        if isinstance(annotation, type) and is_dataclass(annotation):
            return self.table(annotation, value, f"{key}.")
        members = union_members(annotation)
        if JsonObject in members and isinstance(value, Mapping):
            try:
                return JsonObject(value)
            except (TypeError, ValueError) as error:
                self.problems.append(Problem((key,), f"{key}: cannot be written as JSON ({error})"))
                return MISSING
        lists = [member for member in members if get_origin(member) is tuple]
        if lists and isinstance(value, Sequence) and not isinstance(value, str):
            inner = get_args(lists[0])[0]
            items = tuple(self.value(inner, item, f"{key}[{index}]", unit) for index, item in enumerate(value))
            return MISSING if any(item is MISSING for item in items) else items
        for member in members:
            if (found := _convert_scalar(member, value)) is not MISSING:
                return found
        self._refuse(annotation, value, key, unit)
        return MISSING

    def _refuse(self, annotation: Any, value: Any, key: str, unit: str | None) -> None:
        choices, typed = choices_of(annotation), f"{key}={value}"
        if typed in _REMOVED:
            self.problems.append(Problem((key,), f"{typed}: no such value any more; {_REMOVED[typed][1]}"))
            return
        if choices is None or not isinstance(value, str):
            self._wrong(key, describe_type(annotation), value, unit)
            return
        near = nearest(value, choices)
        hint = f"; did you mean {near}?" if near else ""
        null = ", null" if NoneType in union_members(annotation) else ""
        self.problems.append(
            Problem((key,), f"{key}: {value!r} is not a legal value; legal: {', '.join(choices)}{null}{hint}")
        )

    def _wrong(self, key: str, expected: str, value: Any, unit: str | None = None) -> None:
        written = self.written.get(key, Written(None))
        text = str(value) if written.text is None or isinstance(value, (str, list)) else written.text
        advice = ""
        if expected.startswith(("text", "one of")) and isinstance(value, (int, float)):
            quoted = f"{key.rpartition('.')[2]}: '{text}'" if written.file else f"\"{key}='{text}'\""
            advice = f"; put it in quotes: {quoted}"
        elif expected.startswith("a list") and isinstance(value, (str, int, float)):
            advice = f"; put it in brackets: {key}=[{text}]"
        elif isinstance(value, str) and (meant := meant_value(value, expected, unit)):
            advice = f"; write {meant}"
        self.problems.append(Problem((key,), f"{key}: expected {expected}, got {_describe_value(value, text)}{advice}"))


def _describe_value(value: Any, text: str) -> str:
    """Return a value as given, `text`, with the name of its kind if that is the mistake."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {text.lower()}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, (int, float)):
        return f"the number {text}"
    if isinstance(value, Mapping):
        return "a table with " + (", ".join(map(str, value)) or "nothing in it")
    return f"the list {list(value)!r}" if isinstance(value, Sequence) else f"{value!r}"


def tokens_of(value: Any) -> Any:
    """The number of tokens that 128K, 2k or 1M means, as this field counts them: 131072, 2048, 1048576; all else as it
    is.
    """
    if isinstance(value, list):
        return [tokens_of(item) for item in value]
    found = _TOKENS.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    tokens = Fraction(found[1]) * {"K": 2**10, "M": 2**20}[found[2].upper()]
    return int(tokens) if tokens.denominator == 1 else value


def _convert_scalar(annotation: Any, value: Any) -> Any:
    """The value as this type, MISSING if it has another: 4 passes for 4.0, 1e6 for 1000000, true never for 1."""
    if get_origin(annotation) is Literal:
        return value if isinstance(value, str) and value in get_args(annotation) else MISSING
    if annotation in (int, float) and not isinstance(value, bool):
        number = float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
        if annotation is float:
            return float(number) if isinstance(number, (int, float)) else MISSING
        is_whole = isinstance(number, int) or (isinstance(number, float) and number.is_integer())
        return int(number) if is_whole and abs(number) < _INT_LIMIT else MISSING
    fits = isinstance(annotation, type) and isinstance(value, annotation)
    return value if fits and (annotation is bool) == isinstance(value, bool) else MISSING


def read_dataclass(cls: type[_T], value: Any, written: Mapping[str, Written] | None = None) -> tuple[_T, list[Problem]]:
    """(an instance of `cls`, every mistake found); a mistaken field has its default in the instance.

    written: how values were typed, by dotted key, for messages that show them so.
    """
    reader = _Reader([], known_keys(cls), written or {})
    found: _T = reader.table(cls, value, "")
    return found, reader.problems


def to_plain(value: Any) -> Any:
    """Return the value as dicts, lists and scalars, for YAML or JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def hash_json(value: object) -> str:
    """SHA-256 in hex of `value` as JSON, however its keys are ordered."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def range_problems(config: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for every number outside its bounds."""
    for item in fields(config):
        value = getattr(config, item.name)
        key = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from range_problems(value, f"{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found = note_of(item)
            if not found.admits(value):
                unit = f" {found.unit}" if found.unit else ""
                yield Problem((key,), f"{key}: got {value}, expected {found.bounds() or 'a number'}{unit}")
