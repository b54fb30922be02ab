"""The frame of the command line: help, lazy verbs, errors and exit codes."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from burst_cli import __version__, render
from burst_cli.app import VERBS
from engine.config.errors import BurstError, ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
HELP_LIMIT_S = 0.4
MOST_MODULES = 63  # of a dry run over SSH whose nodes do not answer: the planner is loaded once they have


CALL = "import sys; from burst_cli.app import main; main({}); print('\\n' + ' '.join(sys.modules))"


def python(code: str, **environment: str) -> str:
    """What a Python of its own prints."""
    command, variables = [sys.executable, "-c", code], {**os.environ, **environment}
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=variables, timeout=200)
    return run.stdout


def test_help_lists_every_verb_with_its_line_and_is_shown_where_no_verb_is_typed(burst) -> None:
    said = burst("--help")
    assert (said.code, [verb for verb in VERBS if verb.name not in said.out or verb.help not in said.out]) == (0, [])
    bare = burst()
    assert (bare.code, "Usage: burst" in bare.out) == (2, True)
    for verb in ("env", "image", "hosts", "checkpoint", "data", "bench", "testbed"):
        alone = burst(verb)
        assert (alone.code, alone.err, f"Usage: burst {verb} [OPTIONS] COMMAND" in alone.out) == (2, "", True)
    assert "Variants take turns in every round" in burst("bench", "--help").out  # holds of all its parts


@pytest.mark.parametrize("words", [*(verb.name for verb in VERBS), "hosts trust"])
def test_every_verb_explains_itself(burst, words: str) -> None:
    result = burst(*words.split(), "--help")
    assert (result.code, f"Usage: burst {words}" in result.out) == (0, True)
    odd = ("<bool>", "--no-json", "--install-completion")  # `--json true` would be refused
    assert [words for words in odd if words in result.out] == []


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fills_its_lines_whatever_the_width_and_leaves_examples_alone(columns: int) -> None:
    lines = [line.strip() for line in python(COLUMNS=str(columns), code=CALL.format(["launch", "--help"])).splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("Without nodes"))
    paragraph = lines[start : lines.index("", start)]
    fills = [len(f"{line} {after.split()[0]}") > columns - 2 for line, after in itertools.pairwise(paragraph)]
    assert (all(fills), "burst launch exp=tiny train.steps=20" in lines) == (True, True)


def test_runs_are_looked_for_in_runs(burst, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("BURST_RUNS_DIR")
    monkeypatch.chdir(tmp_path)
    assert burst("report").out.startswith(f"No runs in {tmp_path}/runs. ")


def test_version_is_that_of_the_package(burst) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (burst("--version").out, __version__) == (f"burst {__version__}\n", project["version"])


@pytest.mark.parametrize(
    ("words", "heavy", "shown"),
    [
        ("--help", "torch numpy hydra omegaconf tokenizers paramiko", "Usage: burst"),
        ("config --groups", "torch numpy hydra omegaconf", "tiny"),
        ("config --fields", "torch numpy hydra omegaconf", "train.seq_len"),
        ("config", "torch", "exp: tiny"),
        ("env check -h", "paramiko", "Usage: burst env check"),
        ("report", "torch hydra omegaconf", "No runs in"),
        ("bench attention -h", "torch numpy matplotlib", "Usage: burst bench attention"),
        ("plan exp=tiny --device cpu --memory-by none", "torch matplotlib", "memory  not predicted"),
        ("data prepare data=text data.paths=[README.md] data.bpe_vocab_size=300", "torch", "vocabulary of 300"),
        ("", "torch hydra omegaconf numpy", '"exp=tiny"'),  # a shell asks what `burst launch exp=ti` may become
    ],
)
def test_a_verb_imports_nothing_heavy_that_it_does_not_need(words: str, heavy: str, shown: str, tmp_path: Path) -> None:
    more = {"BURST_CACHE_DIR": str(tmp_path)}
    more |= {} if words else {"_BURST_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "burst launch exp=ti"}
    *lines, modules = python(CALL.format(words.split()), **more).splitlines()
    assert {name.partition(".")[0] for name in modules.split()}.isdisjoint(heavy.split())
    assert shown in "\n".join(lines)


def test_a_rehearsal_over_ssh_imports_few_files_of_ours() -> None:
    words = "launch exp=tiny --hosts 127.0.0.1 cluster.ssh.port=1 --dry-run"
    *_, modules = python(CALL.format(words.split())).splitlines()
    ours = [name for name in modules.split() if (ROOT / f"{name.replace('.', '/')}.py").is_file()]
    assert {"cluster.launch.ssh", "cluster.ssh.session", "cluster.checks.launch"} < set(ours)
    assert len(ours) <= MOST_MODULES


def test_help_appears_at_once() -> None:
    # Seconds of processor time, and the best of several: other work on the machine may slow any one of them.
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "burst_cli", "--help"], capture_output=True, check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < HELP_LIMIT_S


def test_error_with_json_is_the_one_document_on_stdout(burst) -> None:
    for words, kind, problems in [
        ("config --json train.seqlen=1 train.steps=x", "ConfigError", ["train.seqlen: no such", "train.steps: expec"]),
        ("report -z --json", "NoSuchOption", ["No such option: -z. See `burst report --help`."]),
    ]:
        result = burst(*words.split())
        error = json.loads(result.out)["error"]
        found, title = error.pop("problems"), error.pop("message")
        assert (result.code, error) == (2, {"exit_code": 2, "type": kind})
        assert all(told.startswith(words) for told, words in zip(found, problems, strict=True))
        assert title == (found[0] if len(found) == 1 else "2 problems in the configuration")


@pytest.mark.parametrize("words", render.REMOVED)
def test_what_is_gone_says_what_to_use(burst, words: str) -> None:
    said = burst(*words.split()[1:], "--more", "words")
    assert (said.code, said.err) == (2, f"error: {words} is gone: {render.REMOVED[words]}\n")


def test_debug_shows_the_traceback_wherever_it_stands(burst) -> None:
    for argv in (("--debug", "config", "model=x"), ("config", "model=x", "--debug")):
        code, _, err = burst(*argv)
        assert (code, "Traceback" in err, "model has no option 'x'" in err) == (2, True, True)


def test_exit_code_and_words_follow_the_kind_of_error(capsys) -> None:
    for error, code, said in [
        (ConfigError("data.paths: '[/red]x' [bold]"), 2, "error: data.paths: '[/red]x' [bold]\n"),  # no markup
        (DataError("x"), 1, "error: x\n"),
        (BurstError("x"), 1, "error: x\n"),
        (KeyError("lost"), 1, "KeyError: 'lost' (a bug in burst: run again with --debug"),
        (FileNotFoundError(2, "No such file", "/gone"), 1, "error: /gone: No such file. Check that"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device. With --debug it is"),
    ]:
        assert render.fail(error) == code
        err = capsys.readouterr().err
        assert (said in err, "Traceback" in err) == (True, False)


def test_json_has_null_for_a_figure_that_is_no_number_and_letters_as_they_are(capsys) -> None:
    render.emit_json({"loss": float("nan"), "path": Path("/ä"), "steps": (1, float("inf"))})
    told = capsys.readouterr().out
    assert ("/ä" in told, json.loads(told)) == (True, {"loss": None, "path": "/ä", "steps": [1, None]})
    render.emit_json({"name": "ä\u202e"})  # which a terminal would obey
    assert capsys.readouterr().out.split() == ["{", '"name":', '"\\u00e4\\u202e"', "}"]


@pytest.mark.parametrize(("columns", "width"), [("0", 320), ("19", 320), ("20", 20)])
def test_a_pipe_is_wide_unless_somebody_says_how_wide(columns: str, width: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert render.stdout().width == width


def with_broken(stream: str, command: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
    """The end of a process whose `stream` goes to a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    try:
        environment = {**os.environ, **more}
        return subprocess.run([sys.executable, *command], **streams, text=True, cwd=ROOT, timeout=200, env=environment)  # type: ignore[call-overload,no-any-return]
    finally:
        os.close(writer)


WRITERS = ("config --fields", "config exp=tiny --json", "launch --help", "env", "env show --format sh", "completion")


@pytest.mark.parametrize("words", WRITERS)
def test_a_reader_that_leaves_early_is_no_failure_of_any_verb(words: str, tmp_path: Path) -> None:
    """A table of rich, a document, help, and lines that are printed: all that a verb has to write with."""
    asked = {"_BURST_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "burst config exp="}
    more = {"XDG_CONFIG_HOME": str(tmp_path), **(asked if words == "completion" else {})}
    result = with_broken("stdout", ["-m", "burst_cli", *words.split()], **more)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_document_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "burst_cli", "config", "--groups", "--json"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=200)
    said = "error: cannot write the result to standard output: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, said)


@pytest.mark.parametrize("words", ["config exp=tiny", "launch --help", "config --fields --json"])
def test_a_result_that_cannot_be_written_fails_without_a_word_of_the_interpreter(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "burst_cli", *words.split()]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=200)
    assert "No space left on device" in result.stderr
    assert (result.returncode, "Exception ignored" in result.stderr) == (1, False), result.stderr


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
    script = "from burst_cli import render; c = render.stderr(); c.print('news'); c.print('more'); print('done')"
    result = with_broken("stderr", ["-c", script])
    assert (result.returncode, result.stdout) == (0, "done\n")
