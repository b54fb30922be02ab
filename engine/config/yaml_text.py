"""YAML of configurations, in which a plain scalar means the same as on the command line.

PyYAML reads YAML 1.1, which changes what people write: 12:00:00 is 43200, `no` and `off` are false, 0100 is 64 and
2026-01-01 a date. Here a plain scalar is null, true, false or a number as in Hydra's grammar of overrides (almost
that of YAML 1.2), and text in all other cases; the setting's type then decides whether text will do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from engine.config.schema import Written

_NULL, _BOOL, _INT, _FLOAT, _STR, _SEQ, _MAP, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)
_DIGITS = r"\d(?:_?\d)*"
_WHOLE = r"(?:0|[1-9](?:_?\d)*)"
_RESOLVERS: dict[str, tuple[str, str]] = {  # tag: (pattern, letters that it may begin with; "" is an empty scalar)
    _NULL: (r"~|(?i:null)|", "~nN"),
    _BOOL: (r"(?i:true|false)", "tTfF"),
    _INT: (rf"[-+]?{_WHOLE}", "-+0123456789"),
    _FLOAT: (
        rf"[-+]?(?:(?:{_WHOLE}?\.{_DIGITS}|{_WHOLE}\.)(?:[eE][-+]?{_DIGITS})?|{_WHOLE}[eE][-+]?{_DIGITS}"
        r"|\.(?i:inf))|\.(?i:nan)",
        "-+.0123456789",
    ),
    _MERGE: ("<<", "<"),
}
_MOST_NESTED = 4000  # the loader in C has no limit: it would overflow the stack
_MOST_VALUES = 100_000  # aliases of aliases can mean more values than fit into memory


def _resolvers(*, with_empty: bool = True) -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, (pattern, letters) in _RESOLVERS.items():
        starts = [*letters, *([""] if tag == _NULL and with_empty else [])]
        for letter in starts:
            table.setdefault(letter, []).append((tag, re.compile(rf"(?:{pattern})\Z")))
    return table


class _Constructors:
    """Rules of both loaders: which scalars are numbers, and no duplicate keys."""

    yaml_implicit_resolvers = _resolvers()
    # A configuration cannot contain dates, sets or Python objects: an explicit tag for them is an error.
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: made
        for tag, made in yaml.SafeLoader.yaml_constructors.items()
        if tag in (None, _NULL, _BOOL, _INT, _FLOAT, _STR, _SEQ, _MAP)
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Node] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE):
            if first := seen.get(key.value):
                line = first.start_mark.line + 1
                text = f"duplicate key {key.value}, which line {line} has too; leave one of them out"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            seen[key.value] = key
        return super().construct_mapping(node, deep=deep)  # type: ignore[misc,no-any-return]


class _SafeLoader(_Constructors, yaml.SafeLoader):
    """The loader in Python, with a nesting limit."""


# In C where PyYAML was built with libyaml: eight times faster.
_FastLoader: Any = (
    type("_FastLoader", (_Constructors, yaml.CSafeLoader), {}) if hasattr(yaml, "CSafeLoader") else _SafeLoader
)


class ConfigDumper(yaml.SafeDumper):
    """Writes plain scalars if this module and readers of YAML 1.1 and 1.2 read back the same value, else quotes."""


for _letter, _more in _resolvers(with_empty=False).items():
    _known = list(yaml.SafeDumper.yaml_implicit_resolvers.get(_letter, []))
    ConfigDumper.yaml_implicit_resolvers = {
        **ConfigDumper.yaml_implicit_resolvers,
        _letter: [*ConfigDumper.yaml_implicit_resolvers.get(_letter, _known), *_more],
    }


def read_text(path: str | Path) -> str:
    """Read a configuration file without the byte order mark that editors on Windows write."""
    return Path(path).read_text(encoding="utf-8-sig")


def load_yaml(text: str) -> Any:
    """Parse YAML. Raises yaml.YAMLError, and RecursionError for too deep nesting."""
    loader = _loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node)
    except (ValueError, TypeError, AttributeError) as error:  # of an explicit tag: `!!int x`
        raise yaml.YAMLError(f"a value does not suit its tag: {error}") from error
    finally:
        loader.dispose()


def written_values(text: str, file: str = "") -> dict[str, Written]:
    """Return for each dotted key (`data.paths[0]` in lists) where and how its value was written in a YAML text.

    Raises yaml.YAMLError, also for a value that contains itself.
    """
    loader = _loader(text)
    try:
        node = loader.get_single_node()
    finally:
        loader.dispose()
    found: dict[str, Written] = {}
    for key, line, plain in () if node is None else _walk(node, "", ()):
        found[key] = Written(plain, file, line + 1)
        if len(found) > _MOST_VALUES:
            raise yaml.YAMLError(f"more than {_MOST_VALUES:,} values; an alias (*name) repeats too much")
    return found


def _loader(text: str) -> Any:
    openings = sum(text.count(sign) for sign in ("[", "{", "- ", "? "))
    return (_FastLoader if openings < _MOST_NESTED else _SafeLoader)(text)


def _walk(node: yaml.Node, key: str, above: tuple[int, ...]) -> Iterator[tuple[str, int, str | None]]:
    """(dotted key, line from 0, text where it stands for another value) of every value below `node`."""
    if id(node) in above:
        raise yaml.constructor.ConstructorError(None, None, "an alias that contains itself", node.start_mark)
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        yield key, node.start_mark.line, None if node.tag == _STR else node.value
    elif isinstance(node, yaml.SequenceNode):
        if key:
            yield key, node.start_mark.line, None
        for index, item in enumerate(node.value):
            yield from _walk(item, f"{key}[{index}]", above)
    else:
        for name, item in node.value:
            if isinstance(name, yaml.ScalarNode):
                inner = key if name.tag == _MERGE else f"{key}.{name.value}" if key else name.value
                yield from _walk(item, inner, above)


def yaml_problem(error: Exception, text: str = "") -> str:
    """Describe an error of a YAML text with its line and a remedy: `line 3: ...`."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    words = getattr(error, "problem", None) or " ".join(str(error).split())
    if mark is None:
        return str(words)
    lines = text.splitlines()
    if mark.line >= len(lines):  # the end of the file: show the unclosed construct instead
        mark = getattr(error, "context_mark", None) or mark
    line = lines[mark.line] if mark.line < len(lines) else ""
    if line.lstrip(" ").startswith("\t"):
        words = "a tab; YAML indents with blanks"
    elif "mapping values are not allowed" in words:
        words += "; indent as the line above, and put text with `: ` in quotes"
    elif "could not determine a constructor" in words:
        words += "; leave the tag (!...) out"
    elif "found undefined alias" in words or "cannot start any token" in words:
        words += "; put text that begins with a sign in quotes"
    shown = f" ({line.strip()})" if line.strip() and "duplicate key" not in words else ""
    return f"line {mark.line + 1}: {words}{shown}"
