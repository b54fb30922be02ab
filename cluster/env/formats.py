"""An environment as text: for a shell, for `docker run --env-file`, for programs, for Hydra.

A value that a format cannot say is refused, never changed: a variable that silently differs on one node is worse than
an error.
"""

from __future__ import annotations

import enum
import json
import re
import shlex
from collections.abc import Callable, Iterable

import yaml

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
    JSON = "json"
    HYDRA = "hydra"

    @property
    def suffix(self) -> str:
        """What file names end in."""
        return {Format.SH: ".sh", Format.DOTENV: ".env", Format.JSON: ".json", Format.HYDRA: ".yaml"}[self]


class UnsayableError(ClusterError):
    """A format has no way to write a value."""


def render_environment(environment: NodeEnvironment, form: Format) -> str:
    """The text of the environment of one node. Raises UnsayableError."""
    for variable in environment.variables:
        if not _NAME.fullmatch(variable.name):
            raise UnsayableError(f"{one_line(variable.name)!r} is no name of a variable")
        if "\0" in variable.value or not _is_unicode(variable.value):
            raise _unsayable(variable, form, "NUL characters and broken Unicode cannot be in an environment file")
    if form is Format.JSON:
        return json.dumps(environment.to_dict(), indent=2, ensure_ascii=False) + "\n"
    if form is Format.HYDRA:
        return _hydra(environment)
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


def _hydra(environment: NodeEnvironment) -> str:
    """What Hydra sets before a job: hydra.job.env_set, at the root of the configuration."""
    for variable in environment.variables:
        if variable.value == "???":
            raise _unsayable(variable, Format.HYDRA, "??? says that a value is missing")
    head = ["# @package _global_", f"# Environment of ranks on {one_line(environment.node)}, by `burst env`."]
    lines = ["hydra:", "  job:", "    env_set:" if environment.variables else "    env_set: {}"]
    for variable in environment.variables:
        lines += [f"      # {one_line(variable.reason, 2000)}", f"      {variable.name}: {_yaml_text(variable.value)}"]
    return "\n".join([*head, *lines]) + "\n"


def _yaml_text(value: str) -> str:
    """Quoted always: OmegaConf reads a bare 1e3 as a number, PyYAML does not."""
    width = 16 * len(value) + 80
    return yaml.safe_dump(_no_interpolation(value), default_style='"', width=width).rstrip("\n")


def _no_interpolation(value: str) -> str:
    r"""`${` as `\${`, and the backslashes before it doubled, so that OmegaConf gives back the very text."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)


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
