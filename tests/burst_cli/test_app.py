"""The frame of the command line: help, lazy verbs, errors and exit codes."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from burst_cli import __version__, render
from burst_cli.app import VERBS
from engine.config.errors import BurstError, ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
HELP_LIMIT_S = 0.4


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=200
    )


def modules_after(*argv: str) -> set[str]:
    """Top-level modules that one call of `burst` imported."""
    code = f"import sys; from burst_cli.app import main; main({list(argv)!r}); print('\\n' + ' '.join(sys.modules))"
    return {name.partition(".")[0] for name in python(code).stdout.splitlines()[-1].split()}


def test_help_lists_every_verb_with_its_line(burst) -> None:
    result = burst("--help")
    assert result.code == 0
    for verb in VERBS:
        assert verb.name in result.out
        assert verb.help in result.out
    assert "<bool>" not in result.out


def test_no_verb_shows_the_help_and_is_a_usage_error(burst) -> None:
    result = burst()
    assert result.code == 2
    assert "Usage: burst" in result.out


@pytest.mark.parametrize("verb", ["env", "image", "hosts", "checkpoint", "data", "bench", "testbed"])
def test_verb_with_parts_alone_shows_its_help(burst, verb: str) -> None:
    result = burst(verb)
    assert (result.code, result.err) == (2, "")
    assert f"Usage: burst {verb} [OPTIONS] COMMAND" in result.out
    assert "<bool>" not in burst("hosts", "trust", "--help").out  # also of parts


def test_a_verb_with_parts_says_what_holds_of_all_of_them(burst) -> None:
    assert "Variants take turns in every round" in burst("bench", "--help").out


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_explains_itself(burst, verb) -> None:
    result = burst(verb.name, "--help")
    assert result.code == 0
    assert f"Usage: burst {verb.name}" in result.out
    assert "<bool>" not in result.out  # `--json true` would be refused


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_fills_its_lines_whatever_the_width_and_leaves_examples_alone(columns) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "burst_cli", "launch", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=200,
        env={**os.environ, "COLUMNS": columns},
    )
    lines = [line.strip() for line in result.stdout.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("Without nodes"))
    paragraph = lines[start : lines.index("", start)]
    assert all(
        len(f"{line} {following.split()[0]}") > int(columns) - 2 for line, following in itertools.pairwise(paragraph)
    )
    assert "burst launch exp=tiny train.steps=20" in lines


def test_version_is_that_of_the_package(burst) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert burst("--version").out == f"burst {__version__}\n"
    assert __version__ == project["version"]


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [
        (("--help",), {"torch", "numpy", "hydra", "omegaconf", "tokenizers", "paramiko"}),
        *((("config", flag), {"torch", "numpy", "hydra", "omegaconf"}) for flag in ("--groups", "--fields")),
        (("config",), {"torch"}),
        (("env", "check", "-h"), {"paramiko"}),
        (("report",), {"torch", "hydra", "omegaconf"}),
        (("data", "prepare", "data=text", "data.paths=[README.md]", "data.bpe_vocab_size=300"), {"torch"}),
    ],
)
def test_a_verb_imports_nothing_heavy_that_it_does_not_need(
    argv: tuple[str, ...], heavy: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path))
    assert modules_after(*argv).isdisjoint(heavy)
    assert ("data" in argv) == any(tmp_path.glob("data/*/prepared.json"))


def test_help_appears_at_once() -> None:
    # Seconds of processor time, and the best of several: other work on the machine may slow any one of them.
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "burst_cli", "--help"], capture_output=True, check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < HELP_LIMIT_S


def test_error_with_json_is_the_one_document_on_stdout(burst) -> None:
    result = burst("config", "--json", "train.seqlen=1", "train.steps=x")
    error = json.loads(result.out)["error"]
    assert result.code == error["exit_code"] == 2
    assert error["type"] == "ConfigError"
    assert [problem.partition(":")[0] for problem in error["problems"]] == ["train.seqlen", "train.steps"]


@pytest.mark.parametrize("words", render.GONE)
def test_what_is_gone_says_what_to_use(burst, words: str) -> None:
    said = burst(*words.split()[1:], "--more", "words")
    assert (said.code, said.err) == (2, f"error: {words} is gone: {render.GONE[words]}\n")


def test_debug_shows_the_traceback_wherever_it_stands(burst) -> None:
    for argv in (("--debug", "config", "model=x"), ("config", "model=x", "--debug")):
        result = burst(*argv)
        assert result.code == 2
        assert "Traceback" in result.err
        assert "model has no option 'x'" in result.err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("data.paths: '[/red]x' [bold]"), 2, "error: data.paths: '[/red]x' [bold]\n"),  # no markup
        (DataError("x"), 1, "error: x\n"),
        (BurstError("x"), 1, "error: x\n"),
        (KeyError("lost"), 1, "KeyError: 'lost' (a bug in burst: run again with --debug"),
        (FileNotFoundError(2, "No such file", "/gone"), 1, "error: /gone: No such file. Check that"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device. With --debug it is"),
    ],
)
def test_exit_code_and_words_follow_the_kind_of_error(error: Exception, code: int, said: str, capsys) -> None:
    assert render.fail(error) == code
    err = capsys.readouterr().err
    assert (said in err, "Traceback" in err) == (True, False)


def test_a_mistake_is_a_document_where_one_was_asked_for(burst) -> None:
    error = json.loads(burst("report", "-z", "--json").out)["error"]
    assert (error["problems"], error["exit_code"]) == (["No such option: -z. See `burst report --help`."], 2)


def test_json_has_null_for_a_figure_that_is_no_number(capsys) -> None:
    render.emit_json({"loss": float("nan"), "path": Path("/a"), "steps": (1, float("inf"))})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "path": "/a", "steps": [1, None]}


@pytest.mark.parametrize(
    "words",
    ["config --fields", "config exp=tiny --json", "launch --help", "env", "env show --format sh", "completion"],
)
def test_a_reader_that_leaves_early_is_no_failure_of_any_verb(words: str, tmp_path: Path) -> None:
    """A table of rich, a document, help, and lines that are printed: all that a verb has to write with."""
    reader, writer = os.pipe()
    os.close(reader)
    asked = {"_BURST_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "burst config exp="}
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), **(asked if words == "completion" else {})}
    command = [sys.executable, "-m", "burst_cli", *words.split()]
    try:
        result = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=200, env=environment
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_another_pipe_that_breaks_is_an_error() -> None:
    script = """
import os, sys, typer
from burst_cli import app
module = typer.Typer()
@module.command()
def breaks() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")
sys.modules["broken_verb"] = type(sys)("broken_verb")
sys.modules["broken_verb"].app = module
app.VERBS = (*app.VERBS, app.Verb("breaks", "broken_verb", "Writes to a pipe."))
sys.exit(app.main(["breaks"]))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert (result.returncode, "Broken pipe" in result.stderr) == (1, True)


def test_work_goes_on_when_nobody_reads_what_is_told_of_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = "from burst_cli import render; c = render.stderr(); c.print('news'); c.print('more'); print('done')"
    command = [sys.executable, "-c", script]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, text=True, cwd=ROOT, timeout=200)
    finally:
        os.close(writer)
    assert (result.returncode, result.stdout) == (0, "done\n")
