"""Plain values into dataclasses, with every mistake told at once, and back.

Standard library only. `engine.config` says which dataclasses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from engine.config_schema import (
    Problem,
    choices_of,
    describe_type,
    known_keys,
    nearest,
    note_of,
    type_hints,
    union_members,
    unknown_key,
)

INT_LIMIT = 2**63  # tensors hold no greater number


@dataclass(frozen=True)
class _Reader:
    """Reads plain values into dataclasses; every mistake goes to `problems` and the default takes its place."""

    problems: list[Problem]
    all_keys: tuple[str, ...]

    def table(self, cls: type[Any], value: Any, prefix: str) -> Any:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self._wrong(prefix.rstrip(".") or "configuration", "a table of settings", value)
            return cls()
        hints = type_hints(cls)
        for name in value:
            if name not in hints:
                self.problems.append(unknown_key(f"{prefix}{name}", self.all_keys))
        read: dict[str, Any] = {}
        for item in fields(cls):
            if item.name not in value:
                continue
            given = tokens_of(value[item.name]) if note_of(item).unit == "tokens" else value[item.name]
            good, result = self.value(hints[item.name], given, f"{prefix}{item.name}")
            if good:
                read[item.name] = result
        return cls(**read)

    def value(self, annotation: Any, value: Any, key: str) -> tuple[bool, Any]:
        if isinstance(annotation, type) and is_dataclass(annotation):
            return True, self.table(annotation, value, f"{key}.")
        if get_origin(annotation) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
            return self._list(get_args(annotation)[0], value, key)
        if get_origin(annotation) is dict and isinstance(value, Mapping):
            return self._dict(get_args(annotation)[1], value, key)
        members = union_members(annotation)
        if len(members) > 1 and isinstance(value, Sequence) and not isinstance(value, str):
            lists = [member for member in members if get_origin(member) is tuple]
            if lists:
                return self.value(lists[0], value, key)
        for member in members:
            good, result = convert_scalar(member, value)
            if good:
                return True, result
        self._refuse(annotation, value, key)
        return False, None

    def _list(self, inner: Any, value: Sequence[Any], key: str) -> tuple[bool, Any]:
        items = [self.value(inner, item, f"{key}[{index}]") for index, item in enumerate(value)]
        return all(good for good, _ in items), tuple(item for _, item in items)

    def _dict(self, inner: Any, value: Mapping[Any, Any], key: str) -> tuple[bool, Any]:
        items = {str(name): self.value(inner, item, f"{key}.{name}") for name, item in value.items()}
        return all(good for good, _ in items.values()), {name: item for name, (_, item) in items.items()}

    def _refuse(self, annotation: Any, value: Any, key: str) -> None:
        choices = choices_of(annotation)
        if choices is None or not isinstance(value, str):
            self._wrong(key, describe_type(annotation), value)
            return
        near = nearest(value, choices)
        hint = f"; did you mean {near}?" if near else ""
        null = ", null" if NoneType in union_members(annotation) else ""
        self.problems.append(
            Problem((key,), f"{key}: {value!r} is not a legal value; legal: {', '.join(choices)}{null}{hint}")
        )

    def _wrong(self, key: str, expected: str, value: Any) -> None:
        advice = ""
        if expected.startswith("text") and isinstance(value, (int, float)):
            advice = f"; put it in quotes: \"{key}='{value}'\""
        elif expected.startswith("a list") and isinstance(value, (str, int, float)):
            advice = f"; put it in brackets: {key}=[{value}]"
        self.problems.append(Problem((key,), f"{key}: expected {expected}, got {describe_value(value)}{advice}"))


def describe_value(value: Any) -> str:
    """A value as it was given, with the name of its kind when that is what is wrong with it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, Mapping):
        return "a table with " + (", ".join(map(str, value)) or "nothing in it")
    return f"the list {list(value)!r}" if isinstance(value, Sequence) else f"{value!r}"


# YAML 1.1, which PyYAML reads, takes 1e-4 for text because it has no dot.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


_TOKENS = re.compile(r"(\d+)([KM])")


def tokens_of(value: Any) -> Any:
    """The number of tokens that 128K or 1M means, as this field counts them: 131072, 1048576; all else as it is."""
    if isinstance(value, list):
        return [tokens_of(item) for item in value]
    found = _TOKENS.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) * {"K": 2**10, "M": 2**20}[found[2]] if found else value


def convert_scalar(annotation: Any, value: Any) -> tuple[bool, Any]:
    """(whether the value has this type, the value): 4 passes for 4.0, 1e6 for 1000000, true never for 1."""
    if get_origin(annotation) is Literal:
        return isinstance(value, str) and value in get_args(annotation), value
    if annotation is NoneType:
        return value is None, None
    if annotation is bool or isinstance(value, bool):
        return annotation is bool and isinstance(value, bool), value
    if annotation in (int, float) and isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if annotation is float:
        return (True, float(value)) if isinstance(value, (int, float)) else (False, None)
    if annotation is int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return (True, int(value)) if whole and abs(value) < INT_LIMIT else (False, None)
    return isinstance(annotation, type) and isinstance(value, annotation), value


def read_dataclass(cls: type[Any], value: Any) -> tuple[Any, list[Problem]]:
    """(an instance of `cls`, every mistake found); a mistaken field has its default in the instance."""
    reader = _Reader([], known_keys(cls))
    return reader.table(cls, value, ""), reader.problems


def to_plain(value: Any) -> Any:
    """The value in dicts, lists and scalars only, ready for YAML or JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def range_problems(config: Any, prefix: str = "") -> Iterator[Problem]:
    """One problem for every number that lies outside the bounds of its own note."""
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
