"""Where configuration files lie and which options each group has. Reads folders only: no Hydra, no YAML parser."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config.errors import ConfigError


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
