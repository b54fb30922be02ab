"""An environment as text and in files: for a shell, or for `docker run --env-file`.

A value that a format cannot say is refused, never changed: a variable that silently differs on one node is worse than
an error.
"""

from __future__ import annotations

import enum
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from cluster.env.facts import EnvironmentVariable, NodeEnvironment
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.hosts import is_host_name
from engine.runs.files import replace_file

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Format(enum.StrEnum):
    """How an environment is written."""

    sh = "sh"
    dotenv = "dotenv"

    @property
    def suffix(self) -> str:
        """What file names end in."""
        return ".sh" if self is Format.sh else ".env"


def write_environments(environments: Mapping[str, NodeEnvironment], folder: Path, form: Format) -> dict[str, Path]:
    """The file of every node, by its name. All texts are made before the first file is, so a refusal leaves nothing.

    The folder is made with mode 0700; one that is there already keeps its own. Raises ClusterError.
    """
    texts = {node: render_environment(environment, form) for node, environment in environments.items()}
    odd = next((node for node in texts if not is_host_name(node)), None)
    if odd is not None:
        raise ClusterError(f"{odd!r} cannot be the name of a file; expected a host name")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A host name may hold a colon (an IPv6 address), which is no good in a file name that goes into a bind mount.
    written = {node: folder / f"{node.replace(':', '_')}{form.suffix}" for node in texts}
    for node, text in texts.items():
        replace_file(written[node], text)
    return written


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
    if not _NAME.fullmatch(variable.name):
        raise ClusterError(f"{one_line(variable.name)!r} is no name of a variable")
    if re.search("[\0\ud800-\udfff]", variable.value):
        raise ClusterError(f"{shown}: NUL characters and broken Unicode cannot be in an environment file")
    if form is Format.dotenv and re.search(r"[\r\n]", variable.value):
        raise ClusterError(
            f"--format dotenv cannot say {shown}: its lines have no way to write a line end. Change what leads to this "
            "value, or use --format sh"
        )
