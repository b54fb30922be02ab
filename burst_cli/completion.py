"""Tab completion of overrides: groups, options, settings and their values, read from folders and dataclasses.

Neither Hydra nor torch is imported here: every press of the key starts a new process.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from burst_cli.config.overrides import Option, list_options, search_path
from engine.config.errors import ConfigError
from engine.config.schema import FieldSpec, walk_fields, walk_sections
from engine.config.settings import RunConfig

Candidate = tuple[str, str]
HELP_WIDTH = 70
MAX_RUNS = 50


def complete_override(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """(text, help) of everything the word under the cursor may become."""
    body = incomplete.lstrip("+~")
    sign = incomplete[: len(incomplete) - len(body)]
    groups = _options_of(ctx.params.get("config_dir"))
    fields = {spec.key: spec for spec in walk_fields(RunConfig)}
    key, equals, value = body.partition("=")
    if equals:
        found = [*_values(key, value, groups, fields), *((f"{key}={path}", "") for path in _paths(value))]
    else:
        found = list(_keys(body, groups, fields))
        if len(found) == 1 and found[0][0].endswith("="):
            # One key left: offer it with its values, so that the shell stops right after the equals sign.
            values = list(_values(found[0][0].removesuffix("="), "", groups, fields))
            found = values if len(values) > 1 else found + values
    return [(sign + text, _one_line(doc)) for text, doc in found]


def complete_run(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """(run id, what it is) of the runs that begin so, newest first; experiments beside them."""
    from engine.runs.folder import default_runs_dir, list_runs

    runs = list_runs(Path(ctx.params.get("runs_dir") or default_runs_dir()))[::-1][:MAX_RUNS]
    found = [(run.run_id, run.exp) for run in runs if run.run_id.startswith(incomplete)]
    exps = dict.fromkeys(run.exp for run in runs if run.exp.startswith(incomplete))
    return [*found, *((exp, "the newest run of this experiment") for exp in exps)]


def complete_run_or_override(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """Runs and overrides that begin so: what `burst eval` takes."""
    return [*complete_run(ctx, incomplete), *complete_override(ctx, incomplete)]


def _paths(value: str) -> Iterator[str]:
    """What a path that was begun, as a whole value or inside a list, may become; folders end in a slash."""
    begun = value[max(value.rfind("["), value.rfind(",")) + 1 :]
    if not begun.startswith(("/", "./", "../", "~/")):
        return
    folder, _, name = begun.rpartition("/")
    with contextlib.suppress(OSError, RuntimeError):  # no such folder, or no home
        for entry in sorted(Path(f"{folder}/").expanduser().iterdir()):
            if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
                yield f"{value.removesuffix(begun)}{folder}/{entry.name}{'/' if entry.is_dir() else ''}"


def _one_line(doc: str) -> str:
    """The help on one line without markup: Typer folds it at 80 columns, and shells read one candidate per line."""
    return escape(doc if len(doc) <= HELP_WIDTH else doc[: HELP_WIDTH - 1] + "…")


def _options_of(config_dirs: Any) -> dict[str, dict[str, Option]]:
    """The options of every group; a folder that does not exist is no reason to complete nothing."""
    try:
        return list_options(search_path([Path(folder) for folder in config_dirs or ()]))
    except ConfigError:
        return list_options(search_path())


def _keys(start: str, groups: Mapping[str, Any], fields: Mapping[str, FieldSpec]) -> Iterator[Candidate]:
    """Groups and top settings as `name=`, sections as `name.`; the settings of a section once it is named."""
    sections = dict(walk_sections(RunConfig))
    near = [name for name in sections if name.startswith(start)]
    tops = [key for key in fields if "." not in key and key not in groups]
    if "." not in start:
        shown = (group for group in groups if group.startswith(start))
        yield from ((f"{group}=", f"group: {', '.join(groups[group])}") for group in shown)
        yield from ((f"{key}=", fields[key].note.doc) for key in tops if key.startswith(start))
        if len(near) != 1:
            yield from ((f"{name}.", sections[name]) for name in near)
            return
        start = f"{near[0]}."
    yield from ((f"{key}=", spec.note.doc) for key, spec in fields.items() if "." in key and key.startswith(start))


def _values(key: str, start: str, groups: Mapping[str, Any], fields: Mapping[str, FieldSpec]) -> Iterator[Candidate]:
    """Values of a group or a setting that begin so, with a word on each; for a number its default alone."""
    values: dict[str, str] = {}
    if key in groups:
        values = {name: option.description for name, option in groups[key].items()}
    elif (spec := fields.get(key)) is not None:
        default = _spell(spec.default)
        legal = spec.legal_values() or (default,)
        values = {value: "default" if value == default else spec.note.doc for value in legal}
    yield from ((f"{key}={value}", doc) for value, doc in values.items() if value.startswith(start))


def _spell(value: Any) -> str:
    """A default as one types it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ",".join(map(_spell, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def run_completion(run: Callable[[], int]) -> int:
    """The exit code of one completion request, which the shell puts into the environment.

    Bash cuts words at = and :, so `exp=ti` arrives as three words and only `tiny` may be answered. The words are
    joined before Typer sees them and the answers cut again; other shells pass whole words.
    """
    cut, answer, is_bash = 0, io.StringIO(), os.environ.get("_BURST_COMPLETE") == "complete_bash"
    if is_bash:
        words, cut = join_bash_words(os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"]))
        os.environ.update(COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))
    with contextlib.redirect_stdout(answer) if is_bash else contextlib.nullcontext():
        try:
            code = run()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    if is_bash:
        print("\n".join(line[cut:] for line in answer.getvalue().splitlines()))
    return code


def join_bash_words(words: Iterable[str], cursor: int) -> tuple[list[str], int]:
    """(the words up to the cursor with bash's cuts undone, how many characters of the last are bash's own).

    burst config exp = ti -> [burst, config, exp=ti], 4
    """
    joined: list[str] = []
    cut, glue = 0, False
    for word in list(words)[: cursor + 1]:
        is_break = bool(word) and not word.strip("=:")
        if joined and word and (glue or is_break):
            cut = len(joined[-1]) + len(word) if is_break else len(joined[-1])
            joined[-1] += word
        else:
            joined.append(word)
            cut = 0
        glue = is_break
    return joined, cut
