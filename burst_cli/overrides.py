"""Overrides, the KEY=VALUE words behind a verb: where configuration files lie, which options each group has, what is
wrong with a word before anything is composed, and how a shell completes it.

Reads folders and dataclasses only, neither Hydra nor YAML nor torch: every press of the tab key starts a new process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from engine.config.errors import ConfigError
from engine.config.schema import FieldSpec, Problem, known_keys, nearest, unknown_key, walk_fields, walk_sections
from engine.config.settings import RunConfig

KNOWN_KEYS = known_keys(RunConfig)
JSON_KEYS = tuple(spec.key for spec in walk_fields(RunConfig) if spec.is_json)  # settings with any keys in them
ROOT_CONFIG = "config"
MOST_CELLS = 2_000


@dataclass(frozen=True)
class Option:
    """One file of a group: `exp=tiny` is the option tiny of the group exp."""

    group: str
    name: str
    path: Path
    description: str


def builtin_conf_dir() -> Path:
    """The folder of the files that come with burst: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def user_conf_dir() -> Path:
    """The folder that a person fills with files of their own; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "burst" / "conf"


def search_path(config_dirs: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Folders in the order they are searched: --config-dir (the last given first), the user's own, the built-in.

    Raises ConfigError for a --config-dir that is no folder.
    """
    given = [Path(folder).expanduser().absolute() for folder in reversed(config_dirs)]
    missing = [folder for folder in given if not folder.is_dir()]
    if missing:
        raise ConfigError(
            [f"--config-dir {folder}: no such folder; give one that holds exp/, model/, ..." for folder in missing]
        )
    own = [user_conf_dir()] if user_conf_dir().is_dir() else []
    return (*given, *own, builtin_conf_dir())


def list_options(folders: Sequence[Path]) -> dict[str, dict[str, Option]]:
    """Options by group and name; the first folder that has a file wins, as Hydra does it."""
    found: dict[str, dict[str, Option]] = {}
    for folder in folders:
        for path in sorted(folder.glob("**/*.yaml")):
            relative = path.relative_to(folder)
            group = relative.parent.as_posix()
            if group != ".":
                option = Option(group, path.stem, path, _first_comment(path))
                found.setdefault(group, {}).setdefault(path.stem, option)
    return {group: dict(sorted(options.items())) for group, options in sorted(found.items())}


def find_file(folders: Sequence[Path], name: str) -> Path | None:
    """The file that Hydra reads for `exp/tiny`, None when no folder has it."""
    file = f"{name.removesuffix('.yaml')}.yaml"
    return next((path for folder in folders if (path := folder / file).is_file()), None)


def _first_comment(path: Path) -> str:
    """The first sentence of the first comment that is prose; empty when there is none."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    prose = (line for line in lines if line.strip() and not line.startswith("# @package"))
    comment = itertools.takewhile(lambda line: line.startswith("#"), prose)
    text = " ".join(line.lstrip("# ").rstrip() for line in comment)
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


Groups = Mapping[str, Mapping[str, Option]]


@dataclass(frozen=True)
class Override:
    """One positional override, parsed: `+train.steps=50` has the sign +, the key train.steps and the value 50."""

    given: str
    sign: str
    key: str
    value: Any
    is_sweep: bool

    @property
    def is_delete(self) -> bool:
        """Whether it takes a setting or a group choice away: `~key`."""
        return self.sign == "~"

    def is_choice(self, groups: Groups) -> bool:
        """Whether it chooses a file of a group (`exp=tiny`) and sets no value itself."""
        return self.key.partition("@")[0] in groups

    def hydra_line(self, groups: Groups) -> str:
        """The override as Hydra must read it.

        Files name few of the settings; ++ lets Hydra set one that no file names. Unknown keys never come this far.
        """
        return self.given if self.is_choice(groups) else f"++{self.given.lstrip('+')}"


def grammar_problem(given: str, detail: str) -> Problem:
    """The problem of a text that is no override at all."""
    if "=" not in given.lstrip("="):
        return Problem((), f"{given!r}: expected KEY=VALUE or GROUP=OPTION, such as train.steps=50 or exp=tiny")
    advice = "put a value with special characters in quotes, such as \"key='a b'\""
    return Problem((), f"{given!r}: not in the grammar of overrides ({detail}); {advice}")


def override_problem(override: Override, groups: Groups) -> Problem | None:
    """What is wrong with one override, None when it may be composed."""
    key, given = override.key, override.given
    if override.is_sweep:
        return Problem(
            (key,), f"{given}: a list of values is a sweep, and one run takes one value; {_one_value_advice(override)}"
        )
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return Problem((key,), f"{given}: settings of Hydra itself have no effect here; leave it out")
    if override.is_choice(groups):
        return _choice_problem(override, groups)
    if key.startswith(tuple(f"{name}." for name in JSON_KEYS)):
        return None
    if key not in KNOWN_KEYS:
        return unknown_key(key, (*KNOWN_KEYS, *(group for group in groups if group not in KNOWN_KEYS)))
    if override.is_delete and "=" in given:
        return Problem((key,), f"{given}: to take a setting back to its default write ~{key}")
    if override.sign == "+":
        return Problem((key,), f"{given}: this setting exists already; write it without the +: {given[1:]}")
    return None


def _one_value_advice(override: Override) -> str:
    if override.key == "data.paths":
        return "several paths need brackets: data.paths=[a,b]"
    return "give one value, or quote it if the comma belongs to it"


def _choice_problem(override: Override, groups: Groups) -> Problem | None:
    """The problem of a group choice: no such option, or something that is no name."""
    group, value = override.key.partition("@")[0], override.value
    options = groups[group]
    if override.is_delete:
        return None
    if not isinstance(value, str) or not value:
        return Problem(
            (group,),
            f"{override.given}: {group} is a group of files and takes the name of one: {', '.join(options)}; "
            f"single settings are written {group}.NAME=VALUE",
        )
    folder, _, name = f"{group}/{value.removesuffix('.yaml')}".rpartition("/")
    if name in groups.get(folder, {}):
        return None
    near = nearest(value, options)
    advice = f"did you mean {group}={near}? " if near else ""
    return Problem(
        (group,), f"{override.given}: {group} has no option {value!r}; {advice}Options: {', '.join(options)}"
    )


@dataclass(frozen=True)
class Axis:
    """One override with its values: `train.seq_len=512,1024` has two, `exp=tiny` one.

    overrides: one per value, as a launch takes it. values: the same without key and sign, as people read them.
    """

    key: str
    overrides: tuple[str, ...]
    values: tuple[str, ...]
    is_sweep: bool


# --- tab completion ---------------------------------------------------------------------------------------------------


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
