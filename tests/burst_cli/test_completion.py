"""Tab completion, through the environment protocol of every shell that Typer supports."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from burst_cli.app import main
from engine.config.settings import PresetName
from engine.runs.folder import create_run

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def bash_words(line: str) -> list[str]:
    """The words as bash hands them over: cut at blanks, and = and : are words of their own."""
    words: list[str] = []
    for part in line.split(" "):
        cut = part.replace("=", "\0=\0").replace(":", "\0:\0").split("\0")
        words += [word for word in cut if word] or [""]
    return words


def environment(shell: str, line: str) -> dict[str, str]:
    """What the shell puts into the environment when the cursor stands at the end of the line."""
    variables = {"_BURST_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        words = bash_words(line)
        return variables | {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    variables |= {"_TYPER_COMPLETE_ARGS": line}
    if shell == "fish":
        variables |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return variables | {"_TYPER_COMPLETE_WORD_TO_COMPLETE": line.rpartition(" ")[2]}


def answer_words(shell: str, text: str) -> list[str]:
    """The candidates in an answer, without their help texts."""
    lines = [line for line in text.splitlines() if line]
    if shell == "zsh":
        body = text.partition("((")[2].rpartition("))")[0]
        return [line.split('"')[1] for line in body.splitlines()]
    if shell == "fish":
        return [line.partition("\t")[0] for line in lines]
    return [line.partition(":::")[0] for line in lines]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], str]:
    """What a shell is told of a line."""

    def run(shell: str, line: str) -> str:
        for name, value in environment(shell, line).items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        assert main([]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def complete(answer: Callable[[str, str], str]) -> Callable[[str, str], list[str]]:
    """The candidates that a shell is offered for a line; bash's without what it has cut off itself."""
    return lambda shell, line: answer_words(shell, answer(shell, line))


def offered(shell: str, line: str, words: list[str]) -> list[str]:
    """Whole words as bash must answer them: without the part before its last cut."""
    start = line.rpartition(" ")[2]
    cut = max(start.rfind("="), start.rfind(":")) + 1
    return [word[cut:] for word in words] if shell == "bash" else words


ATTENTION = [f"attention={name}" for name in sorted(get_args(PresetName))]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_candidates_are_the_same_in_every_shell(complete, shell: str) -> None:
    for line, expected in [
        ("burst config exp=ti", ["exp=tiny"]),
        ("burst data prepare exp=ti", ["exp=tiny"]),
        ("burst config exp=tiny attention=", ATTENTION),
        ("burst config train.seq_", ["train.seq_len=", "train.seq_len=4096"]),
        ("burst config train.seq_len=", ["train.seq_len=4096"]),
        ("burst config attention.preset=s", ["attention.preset=single", "attention.preset=striped"]),
        ("burst config train.profile=1:", []),
        ("burst config lo", ["loss.chunk_tokens=", "loss.z_loss="]),
        ("burst config train.compile=", ["train.compile=true", "train.compile=false"]),
        ("burst config parallel.cp_size=", ["parallel.cp_size=null"]),
        ("burst config attention.gradient_wire_dtype=n", ["attention.gradient_wire_dtype=null"]),
        ("burst config ++train.compi", ["++train.compile=true", "++train.compile=false"]),
        ("burst config ~optimizer.beta", ["~optimizer.beta1=", "~optimizer.beta2="]),
        ("burst config --fie", ["--fields"]),
        ("burst config no.such.key=", []),
    ]:
        assert complete(shell, line) == offered(shell, line, expected)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_is_answered_in_its_own_form(complete, shell: str) -> None:
    for line, expected in (("burst con", ["config"]), ("burst launch exp=ti", ["exp=tiny"])):
        assert complete(shell, line) == offered(shell, line, expected)


def test_words_sections_and_files_of_ones_own_are_offered_with_help_in_one_line_without_markup(
    answer, complete, tmp_path: Path
) -> None:
    words = complete("zsh", "burst config ")
    assert {"exp=", "model=", "attention=", "train.", "optimizer.", "seed="} <= set(words)
    assert complete("fish", "burst config loss.") == ["loss.chunk_tokens=", "loss.z_loss="]
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\n# [/red] long " + "word " * 60 + "\n")
    told = answer("fish", f"burst config --config-dir {tmp_path} exp=m")
    assert told == f"exp=mine\t{('[/red] long ' + 'word ' * 60)[:69]}…\n"
    on, off = answer("fish", "burst config train.compile=").splitlines()
    assert (on.startswith("train.compile=true\t"), off) == (True, "train.compile=false\tdefault")


def install(folder: Path, shell: str) -> dict[str, str]:
    """The environment of a person with an empty home who has typed `burst --install-completion` in this shell."""
    command = folder / "burst"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m burst_cli "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    variables = {**os.environ, **path, "TERM": "dumb", "INPUTRC": "/dev/null"}  # not the keys of whoever runs the tests
    typed = ["bash", "-c", "burst --install-completion; exit $?"]  # which shell it is, is found by looking at parents
    if shell != "bash":  # need not be here
        typed, variables["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = ["burst", "--install-completion", shell], "1"
    subprocess.run(typed, cwd=folder, env=variables, check=True, capture_output=True, timeout=200)
    return variables


def read_until(terminal: int, mark: str, limit_s: float = 30.0) -> str:
    """What appears on the terminal up to the mark."""
    screen, end = "", time.monotonic() + limit_s
    while mark not in screen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            screen += os.read(terminal, 4096).decode(errors="replace")
    return screen


def test_installed_into_a_real_bash_it_completes_verbs_and_behind_the_equals_sign(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("PS1='$ '\nbind 'set bell-style none'\nbind 'set enable-bracketed-paste off'\n")
    environment = install(tmp_path, "bash")
    terminal, inside = pty.openpty()
    streams: dict[str, Any] = {"stdin": inside, "stdout": inside, "stderr": inside, "start_new_session": True}
    with subprocess.Popen(["bash", "--noprofile", "-i"], env=environment, **streams) as shell:
        try:
            read_until(terminal, "$ ")
            os.write(terminal, b"burst la\texp=ti\tattention.pres\tri\tEND")
            assert "burst launch exp=tiny attention.preset=ring END" in read_until(terminal, "END")
        finally:
            shell.kill()
    os.close(inside)
    os.close(terminal)


def test_installed_for_zsh_it_is_found_and_asks_as_zsh(tmp_path: Path) -> None:
    install(tmp_path, "zsh")
    startup, script = (tmp_path / ".zshrc").read_text(), (tmp_path / ".zfunc/_burst").read_text()
    assert ("fpath+=~/.zfunc" in startup, "compinit" in startup) == (True, True)
    assert script.strip().startswith("#compdef burst")
    assert 'env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _BURST_COMPLETE=complete_zsh burst' in script


def test_paths_are_offered_as_values_and_inside_lists(complete, tmp_path: Path) -> None:
    for name in ("corpus/books", "corpus/.hidden"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "corpus/notes.txt").write_text("")
    start = f"data.paths=[{tmp_path}/a,{tmp_path}/corpus/"
    assert complete("zsh", f"burst launch {start}") == [f"{start}books/", f"{start}notes.txt"]
    assert complete("zsh", f"burst launch model.init_from={tmp_path}/co") == [f"model.init_from={tmp_path}/corpus/"]
    note = f"data.tokenizer={tmp_path}/corpus/n"
    assert complete("fish", f"burst launch {note}") == [f"{note}otes.txt"]
    assert complete("zsh", "burst launch data.paths=[/no/such/folder/") == []


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "resume", "report"])
def test_runs_are_offered_by_id_and_experiment(complete, tmp_path: Path, verb: str) -> None:
    for run_id in ("20260101-000000-aaaaaa", "20260202-000000-bbbbbb"):
        create_run(tmp_path / "runs" / "tiny" / run_id, {})
    assert complete("zsh", f"burst {verb} 202601") == ["20260101-000000-aaaaaa"]
    assert complete("fish", f"burst {verb} 2026") == ["20260202-000000-bbbbbb", "20260101-000000-aaaaaa"]
    assert [complete("bash", f"burst {verb} {start}") for start in ("t", "no")] == [["tiny"], []]
