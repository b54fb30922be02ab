"""Where configuration files lie, which options each group has, and what is wrong with an override before anything is
composed. Reads folders only: no Hydra, no YAML parser."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.config.schema import Problem, known_keys, nearest, unknown_key
from engine.config.settings import RunConfig

KNOWN_KEYS = known_keys(RunConfig)
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
    package = Path(__file__).resolve().parents[1]
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
        lines = path.read_text(encoding="utf-8").splitlines()
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
