"""`burst config`: the composed configuration with the source of each value, and lists of all there is to set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.config.conf_dirs import Option, builtin_conf_dir, list_options, search_path
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument
from burst_cli.tables import listing
from engine.config.errors import ConfigError
from engine.config.schema import to_plain, walk_fields, walk_sections
from engine.config.settings import RunConfig, config_fingerprint, config_to_dict

app = new_verb()

# A value longer than this does not push the column of sources further to the right.
MAX_VALUE_WIDTH = 64


@app.command()
def config(
    overrides: OverridesArgument = None,
    config_dir: ConfigDirOption = None,
    groups: Annotated[bool, typer.Option("--groups", help="List the options of every group.")] = False,
    fields: Annotated[bool, typer.Option("--fields", help="List every setting with its meaning.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the composed configuration and where each value comes from.

    The output is YAML; `default` means that neither a file nor an override sets the value. Files are looked for in the
    folders of --config-dir, the last one first, then in ~/.config/burst/conf, then among the built-in ones.
    """
    asked = [name for name, wanted in (("--groups", groups), ("--fields", fields)) if wanted]
    if asked and overrides:
        raise ConfigError(f"{asked[0]} lists what there is, whatever the overrides; leave out {' '.join(overrides)}")
    document: dict[str, Any] = {}
    if groups:
        document |= _show_groups(list_options(search_path(config_dir or [])), as_json)
    if fields:
        document |= _show_fields(as_json)
    if not asked:
        document = _show_config(overrides or [], config_dir or [], as_json)
    if as_json:
        render.emit_json(document)


def _show_config(overrides: Sequence[str], config_dirs: Sequence[Path], as_json: bool) -> dict[str, Any]:
    # Hydra is slow to import and only this listing needs it.
    from burst_cli.compose import compose

    composed = compose(overrides, config_dirs)
    if not as_json:
        console = render.stdout()
        for line in config_lines(composed.config, composed.sources):
            console.print(line, soft_wrap=True)
    return {
        "config": config_to_dict(composed.config),
        "sources": {spec.key: composed.sources.get(spec.key, "default") for spec in walk_fields(RunConfig)},
        "overrides": composed.overrides,
        "fingerprint": config_fingerprint(composed.config),
    }


def config_lines(config: RunConfig, sources: Mapping[str, str]) -> Iterator[Text]:
    """The configuration as YAML, one line per value, the source of each as an aligned comment."""
    rows = list(_yaml_rows(config_to_dict(config), "", 0))
    width = min(MAX_VALUE_WIDTH, max(len(line) for line, _ in rows))
    for line, key in rows:
        if key is None:
            yield Text(line, style="bold")
            continue
        source = sources.get(key, "default")
        yield Text.assemble(line.ljust(width), ("  # " + source, _source_style(source)))


def _source_style(source: str) -> str:
    if source == "default":
        return "dim"
    return "green" if source.endswith(".yaml") else "yellow"


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
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def _show_groups(groups: Mapping[str, Mapping[str, Option]], as_json: bool) -> dict[str, Any]:
    if not as_json:
        rows = [
            ("" if index else group, option.name, option.description, _origin(option.path))
            for group, options in groups.items()
            for index, option in enumerate(options.values())
        ]
        render.stdout().print(listing(("group", "option", "what it is", "file"), rows))
    listed = {group: [_as_dict(option) for option in options.values()] for group, options in groups.items()}
    return {"groups": listed}


def _as_dict(option: Option) -> dict[str, str]:
    return {"name": option.name, "description": option.description, "path": str(option.path)}


def _origin(path: Path) -> str:
    return "built-in" if path.is_relative_to(builtin_conf_dir()) else str(path)


def _show_fields(as_json: bool) -> dict[str, Any]:
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
    if not as_json:
        rows: list[tuple[str | Text, ...]] = []
        for section, doc in {"": "the run", **dict(walk_sections(RunConfig))}.items():
            rows.append((Text(section or "(top)", style="bold"), "", "", Text(doc, style="italic")))
            rows += [
                (f"  {one['key']}", _yaml_value(one["default"]), _legal_text(one), str(one["doc"]))
                for one in fields
                if str(one["key"]).rpartition(".")[0] == section
            ]
        render.stdout().print(listing(("setting", "default", "legal", "meaning"), rows))
    return {"fields": fields}


def _legal_text(field: Mapping[str, Any]) -> str:
    """What may be written for a setting: its values, or its type with bounds and unit."""
    if field["legal"]:
        return " | ".join(field["legal"])
    return ", ".join(filter(None, (field["type"], field["bounds"], f"in {field['unit']}" if field["unit"] else "")))
