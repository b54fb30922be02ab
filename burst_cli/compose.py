"""Configuration files and overrides become one checked `RunConfig`. The only module that imports Hydra.

Hydra composes and nothing else: no logging, no change of folder, no global object left behind. Settings that no file
names have the defaults of `engine.config.settings`, so `key=value` works for every documented setting without a `+`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hydra import version as hydra_version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import dump

from burst_cli.config_files import ConfigFiles, shown_path
from burst_cli.overrides import (
    JSON_KEYS,
    MOST_CELLS,
    ROOT_CONFIG,
    Axis,
    Groups,
    Override,
    find_file,
    grammar_problem,
    list_options,
    override_problem,
    search_path,
)
from engine.config.errors import ConfigError
from engine.config.schema import Problem, Written, read_dataclass, to_plain
from engine.config.settings import RunConfig
from engine.config.yaml_text import ConfigDumper
from engine.resolve import legality

EVALUATION = "-eval"  # ends the name of an experiment whose runs only evaluate
_LONGEST_NAME = 100
T = TypeVar("T")
_SIGNS = {OverrideType.CHANGE: "", OverrideType.ADD: "+", OverrideType.FORCE_ADD: "++", OverrideType.DEL: "~"}


@dataclass(frozen=True)
class Composed:
    """A checked configuration, the overrides as given, and where the values came from.

    `sources`: dotted key -> file (`conf/exp/tiny.yaml`), override (`train.steps=50`) or `default`, for every setting
    that a file or an override names; a key that is absent has its default. `notes`: what was made to fit, in words.
    """

    config: RunConfig
    overrides: tuple[str, ...]
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()


def compose(overrides: Sequence[str], config_dirs: Sequence[Path] = (), base: RunConfig | None = None) -> Composed:
    """The configuration that the files and these overrides spell, checked as a whole.

    Folders are searched in this order: `config_dirs` (the last one first), ~/.config/burst/conf, the built-in files.
    With `base` all settings begin with its values in place of those of files; overrides, chosen files among them,
    change some. Raises ConfigError with every mistake found in overrides, types, choices and rules between settings.
    """
    folders = search_path(config_dirs)
    groups = list_options(folders)
    accepted, problems = _read_overrides(overrides, groups)
    values = [override for override in accepted if not override.is_choice(groups)]
    try:
        with _begin_with(base, folders, groups) as searched:
            files = ConfigFiles(searched, groups)
            composed, choices, layers = _run_hydra(files, accepted, groups)
            missing = _missing_problems(files, layers, values)
            sources, written = _trace_sources(files, layers, values)
    except ConfigError as error:
        raise ConfigError([*(problem.text for problem in problems), *error.problems]) from error
    config, mistakes = read_dataclass(RunConfig, composed, written)
    problems += missing
    absent = {key for problem in missing for key in problem.keys}  # to read their ??? fails, too
    problems += [_with_file(problem, sources, written) for problem in mistakes if absent.isdisjoint(problem.keys)]
    config = _name_after_choice(config, choices, sources)
    if config.train.evaluate_only and not config.exp.endswith(EVALUATION):
        config = replace(config, exp=config.exp[: _LONGEST_NAME - len(EVALUATION)] + EVALUATION)
    config, contradictions = count_nodes(config, sources)
    problems += contradictions
    config, notes = _fit_to_steps(config, sources)
    # A rule about a setting that could not be read would speak of its default, which nobody asked for.
    doubtful = {key for problem in problems for key in problem.keys}
    broken = [problem for problem in legality.problems(config) if doubtful.isdisjoint(problem.keys)]
    problems += [_with_file(problem, sources, written) for problem in broken]
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return Composed(config, tuple(overrides), sources, notes)


@contextlib.contextmanager
def _begin_with(base: RunConfig | None, folders: Sequence[Path], groups: Groups) -> Iterator[Sequence[Path]]:
    """The folders to search: those given, behind one whose root file has the values of `base` and chooses no file."""
    if base is None:
        yield folders
        return
    choices = [{group: None} for group in groups if group != "exp" and "/" not in group]
    with tempfile.TemporaryDirectory(prefix="burst-base-") as folder:
        values = {"defaults": ["_self_", *choices], **_literal(to_plain(base))}
        text = dump(values, Dumper=ConfigDumper, allow_unicode=True)
        (Path(folder) / f"{ROOT_CONFIG}.yaml").write_text(text, encoding="utf-8")
        yield (Path(folder), *folders)


def _literal(values: Any) -> Any:
    """The same values, in which nothing is an interpolation: what a saved setting holds stands for itself."""
    if isinstance(values, dict):
        return {key: _literal(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_literal(value) for value in values]
    if isinstance(values, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", values)
    return values


def sweep_axes(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> list[Axis]:
    """The axes that overrides in Hydra's grammar of sweeps spell: lists, choice(), range(), glob(), sort(), shuffle().

    Values are not checked here, because every cell is composed by itself; a key that no setting has is said once.
    Raises ConfigError with every text that is none.
    """
    folders = search_path(config_dirs)
    groups, loader = list_options(folders), _config_loader(folders)
    axes, problems = _parsed(overrides, lambda parsed, key, given: _axis(parsed, key, given, loader))
    for axis in axes:
        key = axis.key.lstrip("+~")
        if axis.overrides and key.partition("@")[0] not in groups:
            problem = override_problem(Override(axis.overrides[0], "", key, axis.values[0], is_sweep=False), groups)
            problems += [] if problem is None else [problem]
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return axes


def _axis(parsed: HydraOverride, key: str, given: str, loader: ConfigLoaderImpl) -> Axis:
    if not parsed.is_sweep_override():
        return Axis(key.lstrip("+"), (given,), (given.partition("=")[2],), is_sweep=False)
    if not parsed.is_discrete_sweep():
        raise HydraException("interval() has no steps; give a list or range(FROM,TO,STEP)")
    parsed.config_loader = loader  # glob() asks it for the options of a group
    values = tuple(itertools.islice(parsed.sweep_string_iterator(), MOST_CELLS + 1))
    plain = tuple(value.strip("'\"") for value in values)
    return Axis(key.lstrip("+"), tuple(f"{key}={value}" for value in values), plain, is_sweep=True)


def _name_after_choice(config: RunConfig, choices: Mapping[str, str], sources: dict[str, str]) -> RunConfig:
    """The configuration with `exp` named after the chosen file, unless a file names it; `custom` without one."""
    if "exp" in sources:
        return config
    choice = choices.get("exp", "custom")
    sources["exp"] = f"exp={choice}" if "exp" in choices else "default"
    return replace(config, exp=choice.removesuffix(".yaml").replace("/", "-"))


def count_nodes(config: RunConfig, sources: dict[str, str]) -> tuple[RunConfig, list[Problem]]:
    """(the configuration with the number of nodes that cluster.nodes names, what is wrong with names and number)."""
    cluster = config.cluster
    if cluster.nodes is None:
        return config, []
    from cluster.ssh.hosts import parse_nodes

    count = 0
    for key, nodes in (("cluster.spare_nodes", cluster.spare_nodes), ("cluster.nodes", cluster.nodes)):
        try:
            count = 0 if nodes is None else len(parse_nodes(nodes, key).names)
        except ConfigError as error:
            return config, [Problem((key,), text) for text in error.problems]
    if cluster.num_nodes not in (None, count):
        text = f"cluster.num_nodes: got {cluster.num_nodes}, but cluster.nodes={cluster.nodes} names {count}"
        return config, [Problem(("cluster.num_nodes", "cluster.nodes"), f"{text}; leave one of them out")]
    sources["cluster.num_nodes"] = sources.get("cluster.nodes", "default")
    return replace(config, cluster=replace(cluster, num_nodes=count)), []


def _fit_to_steps(config: RunConfig, sources: dict[str, str]) -> tuple[RunConfig, tuple[str, ...]]:
    """(the configuration with counts of steps that fit a typed train.steps, a note on each that was shortened).

    Only where train.steps was typed, as a first try is, and the other count was not: what both were typed, or both
    stand in files, is a contradiction that only its author can resolve.
    """
    typed, steps = sources.get("train.steps", "default"), config.train.steps
    if not _is_typed(typed) or steps < 1:
        return config, ()
    notes: list[str] = []

    def at_most(key: str, wanted: int, most: int) -> int:
        if wanted <= most or _is_typed(sources.get(key, "default")):
            return wanted
        sources[key] = typed
        notes.append(f"{key} is {most}, not {wanted}: the run has {steps} steps")
        return most

    optimizer = config.optimizer
    warmup = at_most("optimizer.warmup_steps", optimizer.warmup_steps, steps)
    decay = optimizer.decay_steps
    if decay is not None:
        decay = at_most("optimizer.decay_steps", decay, max(0, steps - warmup))
    return replace(config, optimizer=replace(optimizer, warmup_steps=warmup, decay_steps=decay)), tuple(notes)


def _is_typed(source: str) -> bool:
    return source != "default" and not source.endswith(".yaml")


def _trace_sources(
    files: ConfigFiles, layers: Sequence[tuple[Path, str]], overrides: Sequence[Override]
) -> tuple[dict[str, str], dict[str, Written]]:
    """(dotted key -> source, dotted key -> how it was written), for every key that a file or an override set.

    layers: files in the order of merging, each with the dotted package that its values were put in; a later one
    replaces an earlier one. `overrides` are those of settings; the choice of a group's file shows in the layers.
    """
    sources: dict[str, str] = {}
    written: dict[str, Written] = {}
    for path, package in layers:
        values = files.values(path)
        known = {key: item for key, item in values.items() if key != "defaults"} if isinstance(values, dict) else {}
        sources |= dict.fromkeys(_leaf_keys(known, package), shown_path(path))
        written |= {f"{package}.{key}".lstrip("."): place for key, place in files.written(path).items()}
    for override in overrides:
        key, text = override.key, override.given.partition("=")[2]
        set_keys = [key] if override.is_delete else [*_leaf_keys(override.value, key)]
        sources = _without(sources, set_keys)
        written = _without(written, set_keys)
        if not override.is_delete:
            sources |= dict.fromkeys(set_keys, override.given)
            is_text = isinstance(override.value, (str, dict, list))
            written[key] = Written(None if is_text else text)
    return sources, written


def _missing_problems(
    files: ConfigFiles, layers: Sequence[tuple[Path, str]], overrides: Sequence[Override]
) -> list[Problem]:
    """A problem for every setting whose last value is ???, which stands for one that must be given.

    Hydra alone would leave the value of an earlier file in its place. Arguments as of `_trace_sources`.
    """
    missing: dict[str, str] = {}
    for path, package in layers:
        values, prefix = files.values(path) or {}, f"{package}." if package else ""
        known = {key: item for key, item in values.items() if key != "defaults"}
        missing = _without(missing, [*_leaf_keys(known, package)])
        for key in _keys_of_labels(known, package):
            place = files.written(path).get(key.removeprefix(prefix))
            where = f"{place.file}, line {place.line}" if place else shown_path(path)
            missing[key] = f"{where} says ??? there. Write a value in its place, or add {key}=VALUE"
    for override in overrides:
        missing = _without(missing, [override.key, *_leaf_keys(override.value, override.key)])
        if not override.is_delete:
            text = f"{override.given} says ???. Write {override.key}=VALUE, or leave it out"
            missing |= dict.fromkeys(_keys_of_labels(override.value, override.key), text)
    return [Problem((key,), f"{key}: must be given, {why}") for key, why in missing.items()]


def _keys_of_labels(value: Any, prefix: str) -> Iterator[str]:
    """The dotted keys of all ??? in nested tables and lists."""
    if value == "???":
        yield prefix
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _keys_of_labels(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _keys_of_labels(item, f"{prefix}[{index}]")


def _without(places: dict[str, T], keys: Sequence[str]) -> dict[str, T]:
    """`places` without these dotted keys and all that lies below them."""
    below = tuple(f"{key}{sign}" for key in keys for sign in ".[")
    return {name: place for name, place in places.items() if name not in keys and not name.startswith(below)}


def _leaf_keys(value: Any, prefix: str) -> Iterator[str]:
    """The dotted keys of all settings in nested tables; the prefix itself for a value that is no table."""
    if (table := next((key for key in JSON_KEYS if f"{prefix}.".startswith(f"{key}.")), None)) is not None:
        yield table
        return
    if not isinstance(value, Mapping):
        yield prefix
        return
    for name, item in value.items():
        yield from _leaf_keys(item, f"{prefix}.{name}" if prefix else str(name))


def _with_file(problem: Problem, sources: Mapping[str, str], written: Mapping[str, Written]) -> Problem:
    """The problem with file and line of the mistake, when a file has it, and with what stands there as a number."""
    places: set[str] = set()
    for key in problem.keys:
        name = key if key in sources else key.partition("[")[0]
        inside = [one for one in sources if one == name or one.startswith((f"{name}.", f"{name}["))]
        files = {sources[one] for one in inside if sources[one].endswith(".yaml")}
        line = next((written[one] for one in (key, name, *inside) if one in written), None)
        if line is not None and line.file and len(files) == 1:
            places.add(_place(line, problem.text, is_value=key in written))
        else:
            places |= files
    return replace(problem, text=f"{problem.text} (in {', '.join(sorted(places))})") if places else problem


def _place(written: Written, message: str, *, is_value: bool) -> str:
    """`mine.yaml, line 7`, and the value as it is written there where the message shows another spelling of it."""
    is_new = is_value and written.text and "got " in message and f"got {written.text}," not in message
    shown = f": {written.text}" if is_new and f" {written.text};" not in message else ""
    return f"{written.file}, line {written.line}{shown}"


def _read_overrides(overrides: Sequence[str], groups: Groups) -> tuple[list[Override], list[Problem]]:
    """(the overrides that may be composed, the problems of all others)."""
    read, problems = _parsed(overrides, _override)
    judged = [(override, override_problem(override, groups)) for override in read]
    problems += [problem for _, problem in judged if problem is not None]
    return [override for override, problem in judged if problem is None], problems


def _override(parsed: HydraOverride, key: str, given: str) -> Override:
    is_sweep = parsed.is_sweep_override()
    value = None if is_sweep else parsed.value()
    return Override(given, _SIGNS.get(parsed.type, ""), key.lstrip("+~"), value, is_sweep)


def _parsed(overrides: Sequence[str], read: Callable[[HydraOverride, str, str], T]) -> tuple[list[T], list[Problem]]:
    """(what `read` makes of each, its key and its text; the problems of those that Hydra's grammar does not know)."""
    parser = OverridesParser.create()
    found: list[T] = []
    problems: list[Problem] = []
    for given in overrides:
        try:
            parsed = parser.parse_override(given)
            key = str(parsed.get_key_element())
            if not key.lstrip("+~"):
                raise HydraException("there is nothing before the =")
            found.append(read(parsed, key, given))
        except (HydraException, ValueError, ArithmeticError) as error:  # the last two of a range without steps or end
            problems.append(grammar_problem(given, str(error).splitlines()[-1].strip()))
    return found, problems


def _run_hydra(
    files: ConfigFiles, overrides: Sequence[Override], groups: Groups
) -> tuple[dict[str, Any], Mapping[str, str], list[tuple[Path, str]]]:
    """(plain values, the chosen option of each group, our files in order of merging, each with its package).

    Raises ConfigError for files that cannot be read or do not fit together.

    As `load_configuration` of Hydra goes, but once for values and their files, and without the forty settings of Hydra
    itself, which it would read from a dozen files of its own each time.
    """
    deleted = [override.key for override in overrides if override.is_delete and not override.is_choice(groups)]
    lines = [override.hydra_line(groups) for override in overrides if override.key not in deleted]
    try:
        loader = _config_loader(files.folders, files)
        loader.ensure_main_config_source_available()
        parsed, repository = loader._parse_overrides_and_create_caching_repo(ROOT_CONFIG, lines)
        order = create_defaults_list(repository, ROOT_CONFIG, parsed, prepend_hydra=False, skip_missing=False)
        composed = loader._compose_config_from_defaults_list(order.defaults, repository)
        OmegaConf.set_struct(composed, True)
        loader._apply_overrides_to_config(order.config_overrides, composed)
        choices = {str(group): str(choice) for group, choice in order.overrides.known_choices.items() if choice}
        values = _plain_values(composed)
    except (HydraException, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise ConfigError(_hydra_text(error, files)) from error
    for key in deleted:
        _delete(values, key)
    found = ((find_file(files.folders, item.config_path), item) for item in order.defaults if item.config_path)
    return values, choices, [(path, item.package or "") for path, item in found if path is not None]


class _Source(FileConfigSource):
    """A folder whose files `ConfigFiles` reads, in place of Hydra's YAML 1.1."""

    def __init__(self, provider: str, path: str, files: ConfigFiles) -> None:
        super().__init__(provider, path)
        self._files = files

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        values = self._files.checked(path, config_path.removesuffix(".yaml"))
        created = OmegaConf.create({} if values is None else values)
        header = self._get_header_dict(self._files.text(path))
        return ConfigResult(config=created, path=f"file://{self.path}", provider=self.provider, header=header)


class _Repository(ConfigRepository):
    """Hydra's, with our folders as sources that read their files by `ConfigFiles`."""

    def __init__(self, search_path: Any, files: ConfigFiles) -> None:
        super().__init__(search_path)
        self.sources = [
            _Source(source.provider, source.path, files) if source.scheme() == "file" else source
            for source in self.sources
        ]


def _config_loader(folders: Sequence[Path], files: ConfigFiles | None = None) -> ConfigLoaderImpl:
    """A loader that searches the folders in this order.

    Hydra's public `initialize_config_dir` takes one folder, looks for the root file only there, puts all other folders
    after it and leaves a global object behind.
    """
    hydra_version.setbase("1.3")
    path = create_config_search_path(str(folders[0]))
    for folder in reversed(folders[1:]):
        path.append("burst", str(folder), anchor=SearchPathQuery(provider="main"))
    loader = ConfigLoaderImpl(path)
    if files is not None:
        loader.repository = _Repository(path, files)
    return loader


def _plain_values(composed: DictConfig) -> dict[str, Any]:
    """The values without what a file says about Hydra itself, interpolations resolved."""
    with open_dict(composed):
        composed.pop("hydra", None)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _delete(values: dict[str, Any], key: str) -> None:
    """Take a dotted key out of nested tables; nothing happens when it is not there, as a default is not."""
    *path, last = key.split(".")
    table: Any = values
    for name in path:
        table = table.get(name) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(last, None)


def _hydra_text(error: BaseException, files: ConfigFiles) -> str:
    """Hydra's message in one line, with the causes that it only chains, each said once, and the file that it is of."""
    if isinstance(error, RecursionError):
        return f"{files.read_last()}: the files name each other in their `defaults:`; take one of the lines out"
    key = str(getattr(error, "full_key", None) or "")
    messages: list[str] = []
    chained: BaseException | None = error
    while chained is not None:
        words = " ".join(str(chained).split()).partition(" full_key: ")[0].partition(" Config search path: ")[0]
        if words and not any(words.strip("'\"b") in earlier for earlier in messages):
            messages.append(words)
        chained = chained.__cause__ or chained.__context__
    text = files.with_paths("; ".join(messages))
    if key:
        place = files.location_of(key)
        return f"{key}: {text}{f' (in {place})' if place else ''}"
    place = files.read_last()
    return f"{place}: {text.removeprefix(f'In {place}: ')}"
