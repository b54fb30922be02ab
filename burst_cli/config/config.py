"""`burst config`: the composed configuration with the source of each value, and lists of all there is to set."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import RenderableType
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument
from burst_cli.overrides import Option, builtin_conf_dir, list_options, search_path
from burst_cli.render import listing
from burst_cli.terminal import can_write
from engine.config.errors import ConfigError
from engine.config.schema import to_plain, walk_fields, walk_sections
from engine.config.settings import RunConfig, config_fingerprint
from engine.config.yaml_text import ConfigDumper

app = new_verb()

MAX_VALUE_WIDTH = 64  # a longer value does not push the column of sources further to the right
Shown = tuple[dict[str, Any], Iterable[RenderableType]]  # the document, and what people see


@app.command()
def config(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    groups: Annotated[bool, typer.Option(help="List the options of every group.")] = False,
    fields: Annotated[bool, typer.Option(help="List every setting with its meaning.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the composed configuration and where each value comes from.

    The output is YAML; `default` means that neither a file nor an override sets the value. Files are looked for in the
    folders of --config-dir, the last one first, then in ~/.config/burst/conf, then among the built-in ones.
    """
    if (groups or fields) and overrides:
        asked = "--groups" if groups else "--fields"
        raise ConfigError(f"{asked} lists what there is, whatever the overrides; leave out {' '.join(overrides)}")
    shown: list[Shown] = [_all_groups(list_options(search_path(config_dir or [])))] if groups else []
    shown += [_all_fields()] if fields else []
    shown = shown or [_composed(overrides or [], config_dir or [])]
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
        source = "" if key is None else sources.get(key, "default")
        style = "dim" if source == "default" else "green" if source.endswith(".yaml") else "yellow"
        yield Text.assemble(line.ljust(width), (f"  # {source}", style)) if source else Text(line, style="bold")


def _yaml_rows(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str | None]]:
    """(line of YAML, dotted key) per value; the key is None for the heading of a section."""
    for name, value in values.items():
        indent = "  " * depth
        if isinstance(value, Mapping):
            yield f"{indent}{name}:", None
            yield from _yaml_rows(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{indent}{name}: {_yaml_value(value)}", f"{prefix}{name}"


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


def _all_fields() -> Shown:
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
    rows: list[tuple[str | Text, ...]] = []
    for section, doc in {"": "the run", **dict(walk_sections(RunConfig))}.items():
        rows.append((Text(section or "(top)", style="bold"), "", "", Text(doc, style="italic")))
        rows += [
            (f"  {one['key']}", _yaml_value(one["default"]), _legal_text(one), str(one["doc"]))
            for one in fields
            if str(one["key"]).rpartition(".")[0] == section
        ]
    return {"fields": fields}, [listing(("setting", "default", "legal", "meaning"), rows)]


def _legal_text(field: Mapping[str, Any]) -> str:
    """What may be written for a setting: its values, or its type with bounds and unit."""
    if field["legal"]:
        return " | ".join(field["legal"])
    return ", ".join(filter(None, (field["type"], field["bounds"], f"in {field['unit']}" if field["unit"] else "")))
