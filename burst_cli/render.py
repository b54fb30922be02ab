"""What people and programs read: consoles, the one JSON document of --json, and errors."""

from __future__ import annotations

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


def stdout() -> Console:
    """A console for results. Prints no markup of its own accord into user text: pass `rich.text.Text` for that."""
    return _console(stderr=False)


def stderr() -> Console:
    """A console for progress, warnings and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def emit_json(document: Mapping[str, Any]) -> None:
    """Print the one JSON document of this call on stdout; paths become text, figures that are no number null."""
    text = json.dumps(_plain(document), indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


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
        emit_json({"error": {"type": type(error).__name__, "message": title, "problems": problems, "exit_code": code}})
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
