"""Configuration files as they lie in the folders that are searched: each read once, with the line of every value, and
with its `defaults:` checked before Hydra sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from yaml import YAMLError

from burst_cli.overrides import KNOWN_KEYS, ROOT_CONFIG, Groups, builtin_conf_dir, find_file
from engine.config.errors import ConfigError
from engine.config.schema import Written, nearest
from engine.config.yaml_text import load_yaml, read_text, written_values, yaml_problem

_EXAMPLE = "`- override /model: small`"
_ENTRY = re.compile(r"(optional\s+)?(override\s+)?([^@\s]+)(@\S*)?")


_PACKAGE = re.compile(r"^\s*#\s*@package\s+\S", re.MULTILINE)


class ConfigFiles:
    """The files of these folders. Raises ConfigError, with file and line, for one that cannot be used."""

    def __init__(self, folders: Sequence[Path], groups: Groups) -> None:
        self.folders = tuple(folders)
        self._groups = groups
        self._texts: dict[Path, str] = {}
        self._values: dict[Path, Any] = {}
        self._written: dict[Path, Mapping[str, Written]] = {}

    def __deepcopy__(self, memo: Mapping[int, Any]) -> ConfigFiles:
        """Itself: Hydra copies its sources before it reads, and what they read must be known here."""
        return self

    def text(self, path: Path) -> str:
        """Without a byte order mark."""
        if path not in self._texts:
            try:
                self._texts[path] = read_text(path)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{shown_path(path)}: not UTF-8 text; save the file as UTF-8") from error
            except OSError as error:
                raise ConfigError(f"{shown_path(path)}: cannot be read: {error.strerror}") from error
        return self._texts[path]

    def values(self, path: Path) -> Any:
        """What the file says; None for an empty one."""
        if path not in self._values:
            text = self.text(path)
            try:
                self._written[path] = written_values(text, shown_path(path))
                self._values[path] = load_yaml(text)
            except (YAMLError, RecursionError) as error:
                problem = yaml_problem(error, text)
                raise ConfigError(f"{shown_path(path)}: not readable as YAML: {problem}") from error
        return self._values[path]

    def written(self, path: Path) -> Mapping[str, Written]:
        """Dotted key -> where and how each value of the file was written."""
        self.values(path)
        return self._written[path]

    def checked(self, path: Path, name: str) -> Any:
        """What the file `name` (`exp/mine`) says, once its `defaults:` are such as Hydra takes."""
        values = self.values(path)
        if values is not None and not isinstance(values, dict):
            got = "a list" if isinstance(values, list) else f"the text {str(values)[:40]!r}"
            raise ConfigError(f"{shown_path(path)}, line 1: expected settings such as `seed: 0`, got {got}")
        if name.startswith("exp/") and not _PACKAGE.search(self.text(path)):
            text = "the first line of a file in exp/ must be `# @package _global_`, and then sections such as `train:`"
            raise ConfigError(f"{shown_path(path)}, line 1: {text}")
        problems = list(self._default_problems(values["defaults"], name)) if _has_defaults(values) else []
        section = "" if _PACKAGE.search(self.text(path)) else name.rpartition("/")[0].replace("/", ".")
        problems += _section_problems(values or {}, f"{section}." if section else "")
        if problems:
            written = self.written(path)
            lines = (_line_of(key, written) for key, _ in problems)
            texts = (text for _, text in problems)
            messages = [f"{shown_path(path)}, line {line}: {text}" for line, text in zip(lines, texts, strict=True)]
            raise ConfigError(messages)
        return values

    def read_last(self) -> str:
        """The file that was read last, of a person's own where there is one."""
        own = [path for path in self._values if not path.is_relative_to(builtin_conf_dir())]
        return shown_path((own or [*self._values] or [self.folders[0]])[-1])

    def location_of(self, key: str) -> str | None:
        """`mine.yaml, line 3` of the last file that sets a dotted key; None where none of those that were read does."""
        tails = {key, key.partition(".")[2]}
        ordered = sorted(self._written.items(), key=lambda item: not item[0].is_relative_to(builtin_conf_dir()))
        found = [written[one] for _, written in ordered for one in tails if one in written]
        return f"{found[-1].file}, line {found[-1].line}" if found else None

    def with_paths(self, text: str) -> str:
        """Hydra's message, with the paths of files in place of names such as 'exp/mine'."""

        def path_of(match: re.Match[str]) -> str:
            path = find_file(self.folders, match[1])
            return shown_path(path) if path is not None else match[0]

        return re.sub(r"(?<=In )'([^']+)'", path_of, text)

    def _default_problems(self, given: Any, name: str) -> Iterator[tuple[str, str]]:
        """(key of the entry, what is wrong) of the `defaults:` of a file."""
        group = name.rpartition("/")[0]
        if not isinstance(given, list):
            kind = "a table" if isinstance(given, dict) else "nothing" if given is None else repr(given)
            yield "defaults", f"defaults: expected a list with a line such as {_EXAMPLE}, got {kind}"
            return
        is_after_override, seen = False, set[str]()
        for index, entry in enumerate(given):
            key = f"defaults[{index}]"
            if isinstance(entry, dict) and len(entry) == 1:
                word, option = next(iter(entry.items()))
                key = f"{key}.{word}"
            else:
                word, option = entry, None
            text = repr(word) if isinstance(entry, str) else f"`{word}: {option}`"
            is_override = isinstance(word, str) and word.startswith(("override ", "optional override "))
            problem = self._entry_problem(entry, group, name)
            if problem is None and str(word) in seen:
                problem = f"{text} is there twice; leave one of them out"
            if problem is None and is_after_override and not is_override:
                problem = f"{text} stands behind a line with `override`; those come last"
            if problem is not None:
                yield key, f"defaults: {problem}"
            seen.add(str(word))
            is_after_override = is_after_override or is_override

    def _entry_problem(self, entry: Any, group: str, name: str) -> str | None:
        """What is wrong with one entry of the file `name` in `group`."""
        if isinstance(entry, str):
            return self._file_problem(entry, group, name)
        if not isinstance(entry, dict) or len(entry) != 1:
            return f"expected a name or one `GROUP: OPTION`, such as {_EXAMPLE}, got {entry!r}"
        word, option = next(iter(entry.items()))
        found = _ENTRY.fullmatch(word) if isinstance(word, str) else None
        if found is None:
            return f"expected `override /GROUP: OPTION`, such as {_EXAMPLE}, got {word!r}"
        is_override = bool(found[2])
        target = found[3].removeprefix("/") if found[3].startswith("/") or not group else f"{group}/{found[3]}"
        options = self._groups.get(target)
        if options is None:
            return self._group_problem(found[3], option, target, is_override=is_override)
        if group and not is_override and target in self._chosen_by_root():
            return f"the root file chooses a {target} already; write `- override /{target}: {option}`"
        return None if found[1] else _option_problem(target, option, options)

    def _file_problem(self, entry: str, group: str, name: str) -> str | None:
        """Of a line that is only a word: another file of the same group."""
        is_optional, word = entry.startswith("optional "), entry.removeprefix("optional ").strip()
        if word == "_self_" or "${" in word:
            return None
        if " " in word or "=" in word:
            return f"expected the name of a file, or `override /GROUP: OPTION` such as {_EXAMPLE}, got {entry!r}"
        plain = word.partition("@")[0].removesuffix(".yaml")
        target = plain.removeprefix("/") if plain.startswith("/") or not group else f"{group}/{plain}"
        if target == name:
            return f"{entry!r} is this file itself; leave it out"
        if is_optional or find_file(self.folders, target) is not None:
            return None
        beside = self._groups.get(target.rpartition("/")[0], {})
        near = nearest(target.rpartition("/")[2], beside)
        known = f"did you mean {near}? " if near else ""
        listed = f"Files there: {', '.join(beside)}" if beside else f"for an option of a group write {_EXAMPLE}"
        return f"there is no file {target}.yaml; {known}{listed}"

    def _group_problem(self, word: str, option: Any, target: str, *, is_override: bool) -> str | None:
        """Of a group that is not there."""
        name = word.removeprefix("/")
        if name in self._groups:  # without its slash it is looked for below the file's own group
            return f"groups begin with a slash: write `- override /{name}: {option}`"
        tops = [group for group in self._groups if "/" not in group]
        near = nearest(name, tops)
        verb = "override " if is_override else ""
        advice = f"; did you mean `- {verb}/{near}: {option}`?" if near else ""
        return f"there is no group {target!r}{advice} Groups: {', '.join(tops)}".replace("' Groups", "'; groups")

    def _chosen_by_root(self) -> set[str]:
        """Groups of which the root file chooses an option."""
        root = find_file(self.folders, ROOT_CONFIG)
        values = self.values(root) if root is not None else None
        given = values["defaults"] if _has_defaults(values) else []
        entries = [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
        return {str(word).removeprefix("/") for entry in entries for word in entry}


def _has_defaults(values: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(values, dict) and "defaults" in values


def _option_problem(group: str, option: Any, options: Mapping[str, Any]) -> str | None:
    names = option if isinstance(option, list) else [option]
    for name in names:
        if name is None or (isinstance(name, str) and "${" in name):
            continue
        if not isinstance(name, str):
            return f"/{group}: expected the name of an option, got {name!r}; put it in quotes"
        if name.removesuffix(".yaml") not in options and "/" not in name:
            near = nearest(name, options)
            advice = f"did you mean {near}? " if near else ""
            return f"there is no option '{group}/{name}'; {advice}Options: {', '.join(options)}"
    return None


def shown_path(path: Path) -> str:
    """The path as a person knows it: short for built-in files, ~ for the home folder."""
    if path.is_relative_to(builtin_conf_dir()):
        return f"conf/{path.relative_to(builtin_conf_dir()).as_posix()}"
    if path.is_relative_to(Path.home()):
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    return str(path)


def _section_problems(values: Mapping[Any, Any], prefix: str, within: str = "") -> Iterator[tuple[str, str]]:
    """(key in the file, what is wrong) of lists that stand for a section, which Hydra cannot merge.

    Args:
        values: what the file says below `within`.
        prefix: where the settings of the file belong, such as `train.`; "" for the whole configuration.
        within: the dotted key of `values` in the file, with a dot behind it; "" for the file itself.
    """
    for name, value in values.items():
        key = f"{prefix}{within}{name}"
        if isinstance(value, list) and any(known.startswith(f"{key}.") for known in KNOWN_KEYS):
            yield f"{within}{name}", f"{key}: expected a table of settings, got a list"
        elif isinstance(value, dict):
            yield from _section_problems(value, prefix, f"{within}{name}.")


def _line_of(key: str, written: Mapping[str, Written]) -> int:
    """The line of a key, or of the first item of its list; 1 where neither is known."""
    return next((written[place].line for place in (key, f"{key}[0]") if place in written), 1)
