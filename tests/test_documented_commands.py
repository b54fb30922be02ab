"""What README.md and docs/ tell people to type exists: verbs, options, experiments and settings; nothing is started.

Every `burst` command of a shell block is parsed by the command line's own parser, and what it composes is composed, in
one process. The configuration files that the pages show are the ones that these commands find.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import pytest
import typer

from burst_cli import render
from burst_cli.app import app
from burst_cli.compose import compose, sweep_axes
from burst_cli.eval.request import OVERRIDES as EVALUATES
from burst_cli.overrides import builtin_conf_dir, list_options
from burst_cli.sweep.plan import cells_of
from engine.config.errors import ConfigError
from engine.config.schema import walk_fields, walk_sections
from engine.config.settings import RunConfig

PACKAGES = ("burst_cli", "cluster", "engine")
ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Configuration files that a verb of the pages makes.
MADE_FILES = {"cluster/testbed": "nodes: tb[1-4]\n", "model/qwen": "defaults: [small, _self_]\n"}
WEIGHTS = f"train.checkpoint.resume_from={ROOT}"
# What stands for files that only the reader has.
STAND_INS = {
    "data.paths": f"data.paths=[{ROOT}/README.md]",
    "data.mix_paths": f"data.mix_paths=[{ROOT}/docs]",
    "data.tokenizer": "data.tokenizer={conf_dir}/tokenizer.json",
    "model.init_from": WEIGHTS,
}
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of click, or of the copy of it in typer
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_OURS = {  # files of the kernel; options of docker, Slurm and benchmarks
    *("memory.events", "memory.oom_control", "--gpus", "--privileged", "--build-arg"),
    *("--nodelist", "--exclusive", "--no-requeue", "--budget-s", "--size", "--output-dir"),
}
MISTAKE = "burst launch exp=tny attention=rng trian.steps=3"  # which README shows with its answer


@dataclass(frozen=True)
class Command:
    """The words after `burst`, and where they stand."""

    page: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.page}: {shlex.join(('burst', *self.words))}"


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands_of(page: Path) -> Iterator[Command]:
    """Every line of shell blocks, what stands behind a prompt, and lists of commands with what they do."""
    for text in blocks(page, "sh"):
        yield from _commands(page, text, dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE)))
    for text in blocks(page, ""):
        lines = [
            re.sub(r"^\$ ", "", line)
            for line in text.splitlines()
            if re.match(r"(\$ )?(\w+ -\S+ .*)?burst [a-z-]+ ", f"{line} ")
        ]
        yield from _commands(page, "\n".join(re.split(r"\s{3,}", line)[0] for line in lines), {})


def _commands(page: Path, text: str, variables: dict[str, str]) -> Iterator[Command]:
    known = {"HOME": "/home/me", "PWD": "/home/me/lab", **variables}
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|[|;>]", Template(line).safe_substitute(known)):
            words = shlex.split(part, comments=True)
            while words and words[0] != "burst" and not words[0].endswith("/burst"):
                words = words[1:]  # salloc -N2 burst ...
            if words and "..." not in words[1:]:
                yield Command(page.name, tuple(words[1:]))


def in_sentences() -> Iterator[tuple[str, str]]:
    """(page, what stands in backquotes) outside of blocks."""
    for page in PAGES:
        for quoted in re.findall(r"`([^`\n]+)`", re.sub(BLOCK, "", page.read_text())):
            yield page.name, quoted


ALL = [command for page in PAGES for command in commands_of(page)]


@pytest.fixture(scope="module")
def conf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of configuration files: those that the pages show, under the names that they give them."""
    folder = tmp_path_factory.mktemp("conf")
    shown = [text for page in PAGES for text in blocks(page, "yaml")]
    named = {found[1]: text for text in shown if (found := re.match(r"# ~/\.config/burst/conf/(\S+)\.yaml", text))}
    assert {"cluster/lab", "cluster/batch"} <= named.keys()
    (named["exp/mine"],) = (text for text in shown if text.startswith("# @package _global_"))
    for name, text in {**named, **MADE_FILES}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("")
    return folder


def parsed(words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """(the verb, its parameters) of a command; raises UsageError for what the command line does not know."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("burst", list(words), resilient_parsing="--install-completion" in words)
    path = []
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            break
        name, command, rest = command.resolve_command(context, rest)
        path.append(name)
        if hasattr(command, "commands") and not rest:
            break  # alone it shows its help
        context = command.make_context(name, rest, parent=context)
    return " ".join(path), context.params


def composed(verb: str, parameters: dict[str, Any], conf_dir: Path) -> RunConfig | None:
    """The configuration that a parsed command means, of a sweep its last cell; None where none is named."""
    words = list(parameters.get("overrides") or parameters.get("words") or [])
    if parameters.get("fields"):  # of `config --fields` they are words to look for
        return None
    if verb == "eval":
        name, words = (words[0], words[1:]) if "=" not in words[0] else ("", words)
        # What is evaluated is the run's; here its experiment has the name.
        words = [*EVALUATES, *([f"exp={name}", WEIGHTS] if name else []), *words]
    if verb == "sweep":
        words = list(cells_of(sweep_axes(words, [conf_dir]))[-1][0])
    words = [_here(word, conf_dir) for word in words]
    return _compose(tuple(words), conf_dir) if words else None


@functools.cache
def _compose(words: tuple[str, ...], conf_dir: Path) -> RunConfig:
    return compose(words, [conf_dir]).config


def _here(word: str, conf_dir: Path) -> str:
    """The override with a file that is there in place of one that only the reader has."""
    key, _, value = word.partition("=")
    return word if value in ("bpe", "bytes") else STAND_INS.get(key, word).format(conf_dir=conf_dir)


def test_commands_of_the_pages_parse_and_compose(conf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(conf_dir / "nobody"))
    assert len(ALL) > 90
    wrong: list[str] = []
    for command in ALL:
        if command.text.endswith(MISTAKE):
            continue
        try:
            composed(*parsed(command.words), conf_dir)
        except (UsageError, ConfigError) as error:
            wrong.append(f"{command.text}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_mistake_that_the_readme_shows_gets_the_answer_that_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(shlex.split(MISTAKE)[2:])
    render.fail(caught.value, as_json=False, debug=False)
    answer = capsys.readouterr().err.strip()
    assert f"$ {MISTAKE}\n{answer}\n```" in (ROOT / "README.md").read_text()


def test_commands_within_sentences_parse(conf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as they go: a sentence may leave out what a command works on, or the value of an option."""
    monkeypatch.chdir(conf_dir)
    wrong = []
    for page, quoted in in_sentences():
        words = shlex.split(quoted.replace("[", "").replace("]", "")) if re.match(r"burst [a-z-]", quoted) else ["..."]
        if "..." in words:
            continue
        try:
            parsed(tuple(words[1:]))
        except UsageError as error:
            left_out = re.search(r"^Missing parameter|requires an argument", str(error))
            wrong += [] if left_out else [f"{page}: {quoted}: {error}"]
    assert not wrong, "\n".join(wrong)


@functools.cache
def nodes_of_the_product() -> list[tuple[str, ast.AST]]:
    """(file, node) of every file that names a command."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path: text for path in paths if re.search(r"burst [a-z]|command\(", text := path.read_text())}
    return [(path.name, node) for path, text in texts.items() for node in ast.walk(ast.parse(text))]


def texts_of_the_product() -> Iterator[tuple[str, str]]:
    """(file, text) of every string, `1` in the place of what is put into it."""
    for file, node in nodes_of_the_product():
        if isinstance(node, ast.JoinedStr):
            yield file, "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield file, node.value


def verbs_for_a_node() -> set[str]:
    """The verb of every command that an error makes for the node that it is about."""
    calls = (node for _, node in nodes_of_the_product() if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func).endswith(("host.command", "node_command")))
    words = (" ".join(str(word.value) for word in call.args if isinstance(word, ast.Constant)) for call in made)
    return set(filter(None, words))


def test_commands_that_remedies_tell_to_type_parse(conf_dir: Path) -> None:
    """As in sentences of the pages; one for a node says how the node is reached, and so is made in one place."""
    wrong: list[str] = []
    told: dict[str, str] = {}
    for file, text in texts_of_the_product():
        told.update((quoted, file) for quoted in re.findall(r"`(burst [a-z][^`]*)`", " ".join(text.split())))
        wrong += [f"{file}: {text}: use Host.command" for _ in re.findall(r"burst (?!testbed)[a-z -]* --hosts 1", text)]
    for quoted, file in told.items():
        try:
            with contextlib.suppress(typer.Exit):  # --help
                parsed(tuple(shlex.split(re.sub(r"\|\S+", "", quoted))[1:]))
        except UsageError as error:
            unknown = re.search(r"^Missing parameter|requires an argument|'1' is not one of", str(error))
            wrong += [] if unknown else [f"{file}: {quoted}: {error}"]
    made = verbs_for_a_node()
    for verb in made:
        _, parameters = parsed((*verb.split(), "cluster=lab", "--hosts", "n1"))
        wrong += [] if parameters["overrides"] == ["cluster=lab"] else [f"{verb} takes no cluster"]
    assert not wrong, "\n".join(wrong)
    assert len(told) > 40, told
    assert made == {"hosts forget", "hosts trust", "check-nodes", "check-nodes --only ib,net"}


def test_flags_settings_and_options_that_sentences_name_exist(conf_dir: Path) -> None:
    settings = {spec.key for spec in walk_fields(RunConfig)} | {name for name, _ in walk_sections(RunConfig)}
    groups = list_options([conf_dir, builtin_conf_dir()])
    sections = {name.partition(".")[0] for name in settings if "." in name}
    flags = set(_flags(typer.main.get_command(app)))
    wrong = []
    for page, quoted in in_sentences():
        keys = re.findall(r"(?<![\w./~-])([a-z_]+\.[a-z_0-9.]*[a-z_0-9])(?==|$|[ ,])", quoted)
        unknown = [key for key in keys if key.partition(".")[0] in sections and key not in settings]
        choices = re.findall(r"(?<![\w.-])([a-z]+)=([a-z_0-9]+)", quoted)
        unknown += [f"{group}={name}" for group, name in choices if name not in groups.get(group, (name,))]
        flag = re.fullmatch(r"(--[a-z][a-z-]*)([ =][^ :]+)?", quoted)  # alone: behind a program it is that program's
        unknown += [flag[1]] if flag and flag[1] not in flags else []
        wrong += [f"{page}: `{quoted}`" for name in unknown if name not in NOT_OURS]
    assert not wrong, "\n".join(wrong)


def _flags(command: Any, context: Any = None) -> Iterator[str]:
    """Every --option of a command and of those below it."""
    context = typer.Context(command, parent=context)
    yield from (
        flag for parameter in command.get_params(context) for flag in (*parameter.opts, *parameter.secondary_opts)
    )
    for name in getattr(command, "commands", {}):
        yield from _flags(command.resolve_command(context, [name])[1], context)
