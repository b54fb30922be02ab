"""What people and programs read: consoles, the one JSON document of --json, and errors."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from engine.errors import BurstError, ConfigError

# Nobody reads a pipe through a window 80 columns wide: tables keep their cells whole there.
PIPE_WIDTH = 320
# Below this rich prints nothing at all; COLUMNS=0 means that somebody did not know.
LEAST_WIDTH = 20


def stdout() -> Console:
    """A console for results. Prints no markup of its own accord into user text: pass `rich.text.Text` for that."""
    return _console(stderr=False)


def stderr() -> Console:
    """A console for progress, warnings and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) >= LEAST_WIDTH:
        width: int | None = int(columns)
    else:
        width = os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def emit_json(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of this call on stdout; paths become text, figures that are no number null."""
    text = json.dumps(_plain(document), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BurstError(f"cannot write the result to standard output: {error.strerror}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def fail(error: BaseException, *, as_json: bool = False, debug: bool = False) -> int:
    """The exit code that this error deserves, after saying on stderr (and, with `as_json`, on stdout) what is wrong."""
    code = exit_code(error)
    problems = _problems(error)
    many = len(problems) > 1
    console = stderr()
    if debug:
        console.print(Text("".join(traceback.format_exception(error)).rstrip(), style="dim"))
    title = f"{len(problems)} problems in the configuration" if many else problems[0]
    console.print(Text.assemble(("error: ", "bold red"), title))
    for line in problems if many else ():
        console.print(Text.assemble(("  • ", "red"), line))
    if as_json:
        with contextlib.suppress(BurstError):  # what could not be written before cannot be written now
            emit_json(
                {"error": {"type": type(error).__name__, "message": title, "problems": problems, "exit_code": code}}
            )
    return code


def exit_code(error: BaseException) -> int:
    """2 for mistakes in usage or configuration, else 1; an error of ours says its own."""
    code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def _problems(error: BaseException) -> list[str]:
    """Every mistake in words, at least one."""
    if isinstance(error, ConfigError) and error.problems:
        return list(error.problems)
    if isinstance(error, BurstError):
        return [str(error)]
    if hasattr(error, "format_message"):
        return [_usage_text(error)]
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{error.filename}: {error.strerror or error}. Check that it exists and that you may use it."]
    return [f"{type(error).__name__}: {error} (a bug in burst: run again with --debug and report what it shows)"]


def _usage_text(error: Any) -> str:
    """A mistake on the command line in words, with the command that explains that verb."""
    context = getattr(error, "ctx", None)
    text = str(error.format_message()).rstrip().rstrip(".")
    return f"{text}. See `{context.command_path if context is not None else 'burst'} --help`."
