"""Where each value of a composed configuration came from: the last file or override that set it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from burst_cli.config.conf_dirs import builtin_conf_dir, find_file
from burst_cli.config.overrides import Override


@dataclass(frozen=True)
class Layer:
    """One configuration file in the order of merging, and the dotted package that its values were put in."""

    path: Path
    package: str

    @classmethod
    def find(cls, folders: Sequence[Path], name: str, package: str) -> Layer | None:
        """The layer of `exp/tiny` in the first folder that has it; None for files that are not ours (Hydra's own)."""
        path = find_file(folders, name)
        return None if path is None else cls(path, package)


def trace_sources(layers: Sequence[Layer], overrides: Sequence[Override]) -> dict[str, str]:
    """Dotted key -> source, for every key that a file or an override set; a later one replaces an earlier one.

    `overrides` are those of settings; the choice of a group's file shows in the layers.
    """
    sources: dict[str, str] = {}
    for layer in layers:
        for key in leaf_keys(_read(layer.path), layer.package):
            sources[key] = shown_path(layer.path)
    for override in overrides:
        for key in leaf_keys(override.value, override.key):
            if override.is_delete:
                sources = {name: source for name, source in sources.items() if not _within(name, key)}
            else:
                sources[key] = override.given
    return sources


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def leaf_keys(value: Any, prefix: str) -> Iterator[str]:
    """The dotted keys of all values in nested tables; the prefix itself for a value that is no table."""
    if not isinstance(value, Mapping):
        yield prefix
        return
    for name, item in value.items():
        yield from leaf_keys(item, f"{prefix}.{name}" if prefix else str(name))


def shown_path(path: Path) -> str:
    """The path as a person knows it: short for built-in files, ~ for the home folder."""
    if path.is_relative_to(builtin_conf_dir()):
        return f"conf/{path.relative_to(builtin_conf_dir()).as_posix()}"
    if path.is_relative_to(Path.home()):
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    return str(path)


def _read(path: Path) -> dict[str, Any]:
    """The values of one file, without its defaults list; Hydra has read the same file before without complaint."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: item for key, item in values.items() if key != "defaults"} if isinstance(values, dict) else {}
