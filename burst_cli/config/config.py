"""`burst config`: the composed configuration with the source of each value, and lists of all there is to set."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import RenderableType
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import ConfigDirOption, FromOption, JsonOption, OverridesArgument, from_folder
from burst_cli.overrides import JSON_KEYS, Option, builtin_conf_dir, list_options, search_path
from burst_cli.render import listing
from burst_cli.terminal import can_write
from engine.config.errors import ConfigError
from engine.config.schema import known_keys, to_plain, unknown_key, walk_fields, walk_sections
from engine.config.settings import RunConfig
from engine.config.yaml_text import ConfigDumper
from engine.runs.record import config_fingerprint

app = new_verb()

FIELDS_WIDTH = 100  # columns of a list that may go to a pipe
MAX_VALUE_WIDTH = 64  # a longer value does not push the column of sources further to the right
Shown = tuple[dict[str, Any], Iterable[RenderableType]]  # the document, and what people see


@app.command()
def config(
    overrides: OverridesArgument = None,
    folder: FromOption = None,
    config_dir: ConfigDirOption = None,
    groups: Annotated[bool, typer.Option(help="List the options of every group.")] = False,
    fields: Annotated[
        bool, typer.Option(help="List every setting with its meaning, or those that the words behind it are of.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the composed configuration and where each value comes from.

    The output is YAML; `default` means that neither a file nor an override sets the value. Files are looked for in the
    folders of --config-dir, the last one first, then in ~/.config/burst/conf, then among the built-in ones.
    """
    words, given = overrides or [], [word for word in overrides or [] if "=" in word or not fields]
    if (groups or fields) and given:
        asked = "--groups" if groups else "--fields"
        raise ConfigError(f"{asked} lists what there is, whatever the overrides; leave out {' '.join(given)}")
    shown: list[Shown] = [_all_groups(list_options(search_path(config_dir or [])))] if groups else []
    shown += [_fields(words)] if fields else []
    shown = shown or [_composed(*from_folder(folder, overrides or [], config_dir or []))]
    document = {name: value for found, _ in shown for name, value in found.items()}
    render.show(document, *(view for _, views in shown for view in views), as_json=as_json)


def _composed(overrides: Sequence[str], config_dirs: Sequence[Path]) -> Shown:
    # Hydra is slow to import and only this listing needs it.
    from burst_cli.compose import compose

    composed = compose(overrides, config_dirs)
    values = to_plain(composed.config)
    document = {
        "config": values,
        "sources": {spec.key: composed.sources.get(spec.key, "default") for spec in walk_fields(RunConfig)},
        "overrides": composed.overrides,
        "fingerprint": config_fingerprint(composed.config),
    }
    return document, _config_lines(values, composed.sources)


def _config_lines(values: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Text]:
    """The configuration as YAML, one line per value, the source of each as an aligned comment."""
    rows = list(_yaml_rows(values, "", 0))
    width = min(MAX_VALUE_WIDTH, max(len(line) for line, _ in rows))
    for line, key in rows:
        source = sources.get(key, "default") if key else ""
        style = "dim" if source == "default" else "green" if source.endswith(".yaml") else "yellow"
        yield (
            Text.assemble(line.ljust(width), (f"  # {source}", style))
            if source
            else Text(line, style="bold" if key is None else "")
        )


def _yaml_rows(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str | None]]:
    """(line of YAML, dotted key) per value; the key is None for the heading of a section, "" inside a JSON table."""
    is_inside = prefix.startswith(tuple(f"{key}." for key in JSON_KEYS))
    for name, value in values.items():
        indent = "  " * depth
        if isinstance(value, Mapping):
            yield f"{indent}{name}:", f"{prefix}{name}" if f"{prefix}{name}" in JSON_KEYS else None
            yield from _yaml_rows(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{indent}{name}: {_yaml_value(value)}", "" if is_inside else f"{prefix}{name}"


def _yaml_value(value: Any) -> str:
    """A scalar or a list as YAML in one line."""
    text = _dumped(value, allow_unicode=True)
    if not can_write(sys.stdout, text):  # in quotes, with escapes that YAML reads back
        text = _dumped(value, allow_unicode=False)
    return text.removesuffix("...\n").strip()


def _dumped(value: Any, *, allow_unicode: bool) -> str:
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": allow_unicode, "width": float("inf")}
    text: str = yaml.dump(value, Dumper=ConfigDumper, **options)
    return text


def _all_groups(groups: Mapping[str, Mapping[str, Option]]) -> Shown:
    rows, listed = [], {}
    for group, options in groups.items():
        listed[group] = [
            {"name": one.name, "description": one.description, "path": str(one.path)} for one in options.values()
        ]
        for index, option in enumerate(options.values()):
            origin = "built-in" if option.path.is_relative_to(builtin_conf_dir()) else str(option.path)
            rows.append(("" if index else group, option.name, option.description, origin))
    return {"groups": listed}, [listing(("group", "option", "what it is", "file"), rows)]


def _fields(words: Sequence[str]) -> Shown:
    """Every setting; with `words` those whose key, section or meaning has one of them. Raises ConfigError for none."""
    fields = [
        {
            "key": spec.key,
            "type": spec.type_text,
            "default": to_plain(spec.default),
            "legal": spec.legal_values() or None,
            "bounds": spec.note.bounds() or None,
            "unit": spec.note.unit,
            "doc": spec.note.doc,
        }
        for spec in walk_fields(RunConfig)
    ]
    fields = [field for field in fields if not words or any(_is_about(field, word) for word in words)]
    if not fields:
        hints = [unknown_key(word, known_keys(RunConfig)).text for word in words]
        raise ConfigError([f"--fields {text}" for text in hints])
    return {"fields": fields}, _field_lines(fields)


def _is_about(field: Mapping[str, Any], word: str) -> bool:
    """Whether a setting is `word`, lies in the section of that name, or speaks of it."""
    if word in dict(walk_sections(RunConfig)):
        return str(field["key"]).startswith(f"{word}.")
    return word.lower() in f"{field['key']} {field['doc']}".lower()


def _field_lines(fields: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Two lines a setting, or more where they are narrow: key, default and legal values; and what it means."""
    sections = {"": "the run", **dict(walk_sections(RunConfig))}
    width, section = min(render.stdout().width, FIELDS_WIDTH), None
    for field in fields:
        if (name := str(field["key"]).rpartition(".")[0]) != section:
            yield from [Text()] if section is not None else []
            yield Text(_wrapped(f"{name or '(top)'}: {sections[name]}", width, "", 2), "bold")
            section = name
        value = f"{field['key']} = {_yaml_value(field['default'])}"
        legal = _wrapped(f"{value}   {_legal_text(field)}", width, "  ", 6)
        yield Text.assemble(*((legal.partition(value)[0], ""), (value, "bold"), legal.partition(value)[2]))
        yield Text(_wrapped(str(field["doc"]), width, "      ", 6), "italic")


def _wrapped(text: str, width: int, first: str, rest: int) -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=" " * rest, break_on_hyphens=False)


def _legal_text(field: Mapping[str, Any]) -> str:
    """What may be written for a setting: its values, or its type with bounds and unit."""
    if field["legal"]:
        return " | ".join(field["legal"])
    return ", ".join(filter(None, (field["type"], field["bounds"], f"in {field['unit']}" if field["unit"] else "")))
