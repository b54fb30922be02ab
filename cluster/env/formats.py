"""An environment as text: for a shell, or for `docker run --env-file`.

A value that a format cannot say is refused, never changed: a variable that silently differs on one node is worse than
an error.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Callable, Iterable

from cluster.env.facts import EnvironmentVariable, NodeEnvironment
from cluster.errors import ClusterError
from cluster.remote_text import one_line

# Docker reads lines of at most 64 KiB; shells and kernels take 128 KiB for one variable.
DOTENV_LINE_BYTES = 60 << 10
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Format(enum.StrEnum):
    """How an environment is written."""

    SH = "sh"
    DOTENV = "dotenv"

    @property
    def suffix(self) -> str:
        """What file names end in."""
        return ".sh" if self is Format.SH else ".env"


class UnsayableError(ClusterError):
    """A format has no way to write a value."""


def render_environment(environment: NodeEnvironment, form: Format) -> str:
    """The text of the environment of one node. Raises UnsayableError."""
    for variable in environment.variables:
        if not _NAME.fullmatch(variable.name):
            raise UnsayableError(f"{one_line(variable.name)!r} is no name of a variable")
        if "\0" in variable.value or not _is_unicode(variable.value):
            raise _unsayable(variable, form, "NUL characters and broken Unicode cannot be in an environment file")
    line = _sh_line if form is Format.SH else _dotenv_line
    head = f"# Environment of ranks on {one_line(environment.node)}, by `burst env`."
    return "\n".join([head, *_commented(environment.variables, line)]) + "\n"


def _commented(variables: Iterable[EnvironmentVariable], line: Callable[[EnvironmentVariable], str]) -> Iterable[str]:
    for variable in variables:
        yield f"# {one_line(variable.reason, 2000)}"
        yield line(variable)


def _sh_line(variable: EnvironmentVariable) -> str:
    return f"export {variable.name}={_single_quoted(variable.value)}"


def _single_quoted(value: str) -> str:
    """Quoted always, so that lines look alike."""
    quoted = shlex.quote(value)
    return quoted if quoted.startswith("'") else f"'{value}'"


def _dotenv_line(variable: EnvironmentVariable) -> str:
    """As `docker run --env-file` reads it: everything after the first `=`, nothing quoted, nothing escaped."""
    if "\n" in variable.value or "\r" in variable.value:
        raise _unsayable(variable, Format.DOTENV, "its lines have no way to write a line end")
    text = f"{variable.name}={variable.value}"
    if len(text.encode()) > DOTENV_LINE_BYTES:
        raise _unsayable(variable, Format.DOTENV, f"its lines hold at most {DOTENV_LINE_BYTES >> 10} KiB")
    return text


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unsayable(variable: EnvironmentVariable, form: Format, why: str) -> UnsayableError:
    shown = one_line(repr(variable.value), 60)
    others = " or ".join(f"--format {other}" for other in Format if other is not form)
    return UnsayableError(
        f"--format {form} cannot say {variable.name}={shown}: {why}. Change what leads to this value, or use {others}"
    )
