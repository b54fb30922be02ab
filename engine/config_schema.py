"""Dataclasses as a schema: notes on fields, lists of settings, types in words, and the name nearest to a wrong one.

Standard library only. Knows nothing of the settings themselves; `engine.config` declares those.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_NOTE = "note"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Note:
    """What a person must know about one field: its meaning, its unit and the numbers it admits."""

    doc: str
    unit: str | None = None
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def bounds(self) -> str:
        """The admitted numbers in words, `0 or more, below 1`; empty when any number will do."""
        low = _bound("more than {}", self.above) or _bound("{} or more", self.at_least)
        high = _bound("below {}", self.below) or _bound("at most {}", self.at_most)
        return ", ".join(part for part in (low, high) if part)

    def admits(self, number: float) -> bool:
        """Whether the number lies within the bounds (NaN and infinity never do)."""
        return (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.at_least is None or number >= self.at_least)
            and (self.below is None or number < self.below)
            and (self.at_most is None or number <= self.at_most)
        )


def _bound(words: str, number: float | None) -> str:
    return "" if number is None else words.format(f"{number:g}")


def note(doc: str, unit: str | None = None, **bounds: float) -> dict[str, Note]:
    """The `metadata` of a dataclass field: `field(default=1, metadata=note("sequences", at_least=1))`."""
    return {_NOTE: Note(doc, unit, **bounds)}


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration: the dotted keys it concerns and a sentence for a person."""

    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class FieldSpec:
    """One setting: its dotted key, type in words, default, legal values (None: not a choice) and note."""

    key: str
    type_text: str
    default: Any
    choices: tuple[str, ...] | None
    note: Note

    def legal_values(self) -> tuple[str, ...]:
        """Every value as it is typed, when there are finitely many; else nothing."""
        if self.choices is None:
            return ("true", "false") if self.type_text == _TYPE_WORDS[bool] else ()
        return (*self.choices, "null") if self.type_text.endswith(" or null") else self.choices


def _cached(function: Callable[[type[Any]], _T]) -> Callable[[type[Any]], _T]:
    """`functools.cache` with its signature kept: type checkers doubt that classes can be hashed."""
    return cast(Callable[[type[Any]], _T], functools.cache(function))


@_cached
def type_hints(cls: type[Any]) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name; found once, because that takes a millisecond."""
    return get_type_hints(cls)


def walk_fields(cls: type[Any], prefix: str = "") -> Iterator[FieldSpec]:
    """Every leaf setting of a tree of dataclasses, in the order of declaration."""
    hints = type_hints(cls)
    for item in fields(cls):
        key = f"{prefix}{item.name}"
        annotation = hints[item.name]
        if is_dataclass(annotation) and isinstance(annotation, type):
            yield from walk_fields(annotation, f"{key}.")
        else:
            yield FieldSpec(key, describe_type(annotation), _default(item), choices_of(annotation), note_of(item))


def walk_sections(cls: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, first line of the docstring) of every nested dataclass, in the order of declaration."""
    hints = type_hints(cls)
    for item in fields(cls):
        annotation = hints[item.name]
        if is_dataclass(annotation) and isinstance(annotation, type):
            yield f"{prefix}{item.name}", (annotation.__doc__ or "").strip().splitlines()[0]
            yield from walk_sections(annotation, f"{prefix}{item.name}.")


@_cached
def known_keys(cls: type[Any]) -> tuple[str, ...]:
    """Every dotted key that may be set: sections and the settings in them."""
    return (*(key for key, _ in walk_sections(cls)), *(spec.key for spec in walk_fields(cls)))


def note_of(item: Field[Any]) -> Note:
    """The note of a dataclass field; an empty one when it has none."""
    found = item.metadata.get(_NOTE)
    return found if isinstance(found, Note) else Note("")


def _default(item: Field[Any]) -> Any:
    if item.default is not MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not MISSING else None


def choices_of(annotation: Any) -> tuple[str, ...] | None:
    """The legal values of a choice, None for any other type."""
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in get_args(annotation))
    for member in union_members(annotation):
        if member is not annotation and (found := choices_of(member)) is not None:
            return found
    return None


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; the type itself for any other."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


_TYPE_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def describe_type(annotation: Any) -> str:
    """The type in words that a person who never wrote Python understands."""
    members = union_members(annotation)
    if len(members) > 1:
        return " or ".join(describe_type(member) for member in members)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list, each item " + describe_type(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return "a table, each value " + describe_type(get_args(annotation)[1])
    if is_dataclass(annotation):
        return "a table of settings"
    return _TYPE_WORDS.get(annotation, str(annotation))


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word most like the given one, None when nothing comes near."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def nearest_key(key: str, keys: Sequence[str]) -> str | None:
    """The dotted key most like the given one: the same name in another section, a like name in its own, a like key."""
    section, _, name = key.rpartition(".")
    split = [(candidate.rpartition(".")[0], candidate.rpartition(".")[2], candidate) for candidate in keys]
    same_name = [candidate for _, tail, candidate in split if tail == name]
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
    """The problem of a setting that does not exist, with the nearest one that does, or those beside it."""
    section = key.rpartition(".")[0]
    near = nearest_key(key, [candidate for candidate in keys if candidate != section])
    beside = [candidate.rpartition(".")[2] for candidate in keys if candidate.rpartition(".")[0] == section]
    if near:
        return Problem((key,), f"{key}: no such setting; did you mean {near}?")
    has = f"{section} has {', '.join(beside)}" if section and beside else "`burst config --fields` lists every setting"
    return Problem((key,), f"{key}: no such setting; {has}")
