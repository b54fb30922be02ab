"""An environment as text: for a shell, or for `docker run --env-file`.

A value that a format cannot say is refused, never changed: a variable that silently differs on one node is worse than
an error.
"""

from __future__ import annotations

import enum
import re
import shlex

from cluster.env.facts import EnvironmentVariable, NodeEnvironment
from cluster.errors import ClusterError
from cluster.remote_text import one_line


class Format(enum.StrEnum):
    """How an environment is written."""

    sh = "sh"
    dotenv = "dotenv"


def render_environment(environment: NodeEnvironment, form: Format) -> str:
    """The text of the environment of one node. Raises ClusterError for what the format cannot say."""
    lines = [f"# Environment of the ranks on {one_line(environment.node)}."]
    for variable in environment.variables:
        _check(variable, form)
        lines += [f"# {one_line(variable.reason, 2000)}", _line(variable, form)]
    return "\n".join(lines) + "\n"


def _line(variable: EnvironmentVariable, form: Format) -> str:
    if form is Format.dotenv:
        # As `docker run --env-file` reads it: everything after the first `=`, nothing quoted, nothing escaped.
        return f"{variable.name}={variable.value}"
    return f"export {variable.name}={shlex.quote(variable.value)}"


def _check(variable: EnvironmentVariable, form: Format) -> None:
    shown = f"{one_line(variable.name)}={one_line(repr(variable.value), 60)}"
    if re.search("[\0\ud800-\udfff]", variable.value):
        raise ClusterError(f"{shown}: NUL characters and broken Unicode cannot be in an environment file")
    if form is Format.dotenv and re.search(r"[\r\n]", variable.value):
        raise ClusterError(
            f"--format dotenv cannot say {shown}: its lines have no way to write a line end. Change what leads to this "
            "value, or use --format sh"
        )
