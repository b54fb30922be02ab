"""What is written is what comes out again: by a real shell and by the real Docker client."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.env.facts import EnvironmentVariable, NodeEnvironment
from cluster.env.formats import DOTENV_LINE_BYTES, Format, UnsayableError, render_environment

HOSTILE = (
    "",
    " leading and trailing ",
    "'single' \"double\" `date` $(id) ${HOME} $HOME \\",
    "#no comment",
    "a=b=c",
    "= mlx5_0:1",
    "\\${x} \\\\${y} ${",
    "Grüße, 世界 \U0001f680",
    "1e3",
    "null",
    "-n",
    "\t{a: 1}, [b] & *c !d %e @f",
    "'; touch /tmp/burst-env-was-here; '",
)
SPLIT = ("line\nbreak", "\r", "a\r\n", "\n")
VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)


def environment(*values: str, reason: str = "why") -> NodeEnvironment:
    return NodeEnvironment("node1", tuple(EnvironmentVariable(f"V{i}", v, reason) for i, v in enumerate(values)))


def by_shell(text: str, names: list[str]) -> list[str]:
    """The values that a real sh has after sourcing `text`."""
    script = text + "\n" + "".join(f'printf "%s\\0" "${name}"\n' for name in names)
    done = subprocess.run(["sh", "-eu"], input=script.encode(), capture_output=True, check=True, timeout=200)
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=40, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=20))
@example([*HOSTILE, *SPLIT])
def test_sh_round_trips_through_a_real_shell(values: list[str]) -> None:
    names = [f"V{index}" for index in range(len(values))]
    assert by_shell(render_environment(environment(*values), Format.SH), names) == values


def docker_reads(line: bytes) -> str:
    """As the Docker client reads a line of --env-file: blanks before it are stripped, none behind."""
    return line.decode().lstrip().partition("=")[2]


@given(VALUES)
def test_dotenv_says_a_value_as_docker_reads_it_or_refuses(value: str) -> None:
    try:
        text = render_environment(environment(value), Format.DOTENV)
    except UnsayableError:
        assert "\n" in value or "\r" in value
        return
    lines = [line for line in text.encode().split(b"\n") if line and not line.startswith(b"#")]
    assert [docker_reads(line) for line in lines] == [value]


@pytest.mark.parametrize("value", SPLIT)
def test_dotenv_refuses_line_ends_and_says_what_can_say_them(value: str) -> None:
    with pytest.raises(UnsayableError, match=r"--format dotenv cannot say V0=.*--format sh"):
        render_environment(environment(value), Format.DOTENV)


def test_dotenv_refuses_lines_that_docker_does_not_read() -> None:
    render_environment(environment("x" * (DOTENV_LINE_BYTES - 3)), Format.DOTENV)
    with pytest.raises(UnsayableError, match="60 KiB"):
        render_environment(environment("x" * DOTENV_LINE_BYTES), Format.DOTENV)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("value", ["a\0b", "\udcff"])
def test_no_format_says_nul_or_broken_unicode(form: Format, value: str) -> None:
    with pytest.raises(UnsayableError, match="NUL characters and broken Unicode"):
        render_environment(environment(value), form)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("name", ["", "1A", "A B", "A\nB", "A=B", "$(id)", "Ä"])
def test_names_that_no_shell_knows_are_refused(form: Format, name: str) -> None:
    odd = NodeEnvironment("node1", (EnvironmentVariable(name, "x", "why"),))
    with pytest.raises(UnsayableError, match="is no name of a variable"):
        render_environment(odd, form)


@pytest.mark.parametrize("form", list(Format))
def test_a_hostile_reason_or_node_stays_within_its_comment(form: Format) -> None:
    odd = NodeEnvironment("node1\nEVIL=1", environment("x", reason="because\nEVIL=1\r\nexport EVIL=1").variables)
    lines = render_environment(odd, form).splitlines()
    assert not [line for line in lines if line.strip().startswith(("EVIL", "export EVIL"))]


def test_an_environment_without_variables_is_still_whole() -> None:
    assert by_shell(render_environment(environment(), Format.SH), []) == []


class _Engine(BaseHTTPRequestHandler):
    """Answers the Docker client just enough to see the body of `docker create`."""

    bodies: list[dict[str, Any]]

    def do_HEAD(self) -> None:
        self._answer(200, b"")

    def do_GET(self) -> None:
        self._answer(200, b"OK")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "/containers/create" in self.path:
            self.bodies.append(json.loads(body))
        self._answer(201, b'{"Id": "0", "Warnings": []}')

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        for name, value in (("Api-Version", "1.41"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "client"

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def docker_engine(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(DOCKER_HOST, bodies of `docker create`) of an engine that records and does nothing."""
    bodies: list[dict[str, Any]] = []
    handler = type("Engine", (_Engine,), {"bodies": bodies})
    with ThreadingUnixStreamServer(str(folder / "docker.sock"), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"unix://{folder / 'docker.sock'}", bodies
        finally:
            server.shutdown()
            thread.join()


# Where CI is set, a skip fails the session.
@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the Docker client (package docker.io)")
def test_dotenv_round_trips_through_the_docker_client(tmp_path: Path) -> None:
    (tmp_path / "node1.env").write_text(render_environment(environment(*HOSTILE), Format.DOTENV), encoding="utf-8")
    with docker_engine(tmp_path) as (host, bodies):
        command = ["docker", "-H", host, "create", "--env-file", str(tmp_path / "node1.env"), "image"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert bodies, done.stderr
    assert bodies[0]["Env"] == [f"V{index}={value}" for index, value in enumerate(HOSTILE)]
