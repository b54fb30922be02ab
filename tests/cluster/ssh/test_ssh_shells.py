"""Commands through log-in shells of every kind, and through start-up files that print: a real sshd runs them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from own_sshd import Server, start_sshd
from testkit.connections import connect
from testkit.needs import require

from cluster.errors import SshError, SshFailure
from cluster.ssh.connection import CommandResult
from cluster.survey.facts import survey_node

# How each shell runs the command line that sshd hands to a log-in shell.
SHELLS = ("dash -c", "bash -c", "busybox sh -c", "tcsh -c", "fish -c")
PROGRAM = "import sys\nfor word in sys.argv[1:]:\n    print(word, end='|')\n"
WORDS = ["a'b\"c", "$HOME", "`id`", "!!", "back\\slash\\", "two\nlines", "", "*", "~", "\\n"]


def shell_server(folder: Path, command: str) -> AbstractContextManager[Server]:
    """A server whose log-in shell is `command`, which finds the command line in $SSH_ORIGINAL_COMMAND."""
    return start_sshd(folder, f"ForceCommand {command}")


def run_behind(folder: Path, command: str, *argv: str, stdin: bytes = b"") -> CommandResult:
    """What a command gives at such a server."""
    with shell_server(folder, command) as server, connect(server.host) as connection:
        return connection.run(argv, stdin=stdin, timeout_s=20)


@pytest.mark.parametrize("shell", SHELLS)
def test_program_of_several_lines_runs_behind_any_log_in_shell(tmp_path: Path, shell: str) -> None:
    require(shell.split()[0])
    command = f'{shell} "$SSH_ORIGINAL_COMMAND"'
    result = run_behind(tmp_path, command, "python3", "-c", PROGRAM, *WORDS)
    assert result.stdout.decode() == "".join(f"{word}|" for word in WORDS), result


def test_stdin_of_a_command_is_not_touched_by_the_log_in_shell(tmp_path: Path) -> None:
    data = b"first\n\0\xff last without an end"
    result = run_behind(tmp_path, 'sh -c "$SSH_ORIGINAL_COMMAND"', "cat", stdin=data)
    assert result.stdout == data


@pytest.mark.parametrize("noise", ["echo hello", "echo hello >&2", "printf 'no line end'", "printf 'a\\0\\377\\n@@'"])
def test_output_is_what_the_command_printed_whatever_start_up_files_print(tmp_path: Path, noise: str) -> None:
    command = f'{noise}; sh -c "$SSH_ORIGINAL_COMMAND"; {noise}'
    result = run_behind(tmp_path, command, "sh", "-c", "echo out; echo error >&2; printf end")
    assert (result.stdout, result.stderr) == (b"out\nend", b"error\n")


def test_exit_code_is_that_of_the_command_and_not_of_a_forced_one(tmp_path: Path) -> None:
    result = run_behind(tmp_path, 'sh -c "$SSH_ORIGINAL_COMMAND"; exit 0', "sh", "-c", "exit 3")
    assert result.exit_code == 3


def test_command_is_over_when_what_it_left_behind_still_holds_its_output(tmp_path: Path) -> None:
    result = run_behind(tmp_path, 'sh -c "$SSH_ORIGINAL_COMMAND"', "sh", "-c", "sleep 60 & echo started")
    assert result.stdout == b"started\n"


def test_clock_of_a_node_is_read_behind_start_up_files_that_print(tmp_path: Path) -> None:
    command = 'echo 1234567890; sh -c "$SSH_ORIGINAL_COMMAND"'
    with shell_server(tmp_path, command) as server, connect(server.host) as connection:
        offset_s = survey_node(connection, []).clock_offset_s
    assert offset_s == pytest.approx(0.0, abs=5.0), "the clock is that of this very machine"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo This account is not available.; exit 1", "the command did not run.*This account is not available"),
        ("echo no shell for you >&2; exit 1", "no shell for you"),
        ("yes", "more than 1 MiB came before"),
    ],
)
def test_log_in_shell_that_runs_nothing_is_named(tmp_path: Path, command: str, words: str) -> None:
    with pytest.raises(SshError, match=words) as caught:
        run_behind(tmp_path, command, "true")
    assert caught.value.kind is SshFailure.SHELL
