"""Which Python of a node is checked, runs ranks, and runs what burst itself brings there."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from testkit import write_program
from testkit.connections import LocalConnection

from cluster.checks.groups.host import SOFTWARE, read_software
from cluster.code import CodeArchive, CodeError, CodeFolder, NodeProgram, build_archive, upload_code
from cluster.ssh.hosts import resolve_hosts
from cluster.survey.facts import NodeFacts, survey_node
from cluster.survey.section import python_question
from engine.config.cluster import ClusterConfig, ContainerConfig

ANSWER = python_question("t.answer", 10, "print(json.dumps([sys.version_info >= (3, 9), os.environ.get('BY')]))\n")


def node_with(folder: Path, python: str | None, *, python3: str | None) -> LocalConnection:
    """A node whose python3 is the shell script `python3` (None: it has none) and whose cluster.python is `python`."""
    for tool in ("sh", "timeout", "date", "cat"):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
    if python3 is not None:
        write_program(folder / "bin/python3", python3)
    connection = LocalConnection("n1", {"PATH": str(folder / "bin"), "HOME": str(folder)})
    connection.host = replace(connection.host, python=python)
    return connection


# What Python 3.6 says of a program for 3.9: it does not get far enough to say which version it is.
OLD = "echo 'SyntaxError: invalid syntax' >&2; exit 1"
WRAPPER = f'BY=wrapper exec {sys.executable} "$@"'


@pytest.mark.parametrize("python3", [OLD, "exit 127"], ids=["too old", "missing"])
def test_questions_are_answered_by_the_configured_python_where_python3_cannot(tmp_path: Path, python3: str) -> None:
    write_program(tmp_path / "my python", WRAPPER)
    with node_with(tmp_path, "~/my python", python3=python3) as connection:
        answer = survey_node(connection, [ANSWER], timeout_s=20).section("t.answer")
    assert answer.document() == [True, "wrapper"], answer


@pytest.mark.parametrize("python3", [OLD, None], ids=["too old", "missing"])
def test_agent_runs_on_the_configured_python_where_python3_cannot(tmp_path: Path, python3: str | None) -> None:
    archive, (place, python) = build_archive(), (CodeFolder(str(tmp_path / "burst/code"), False), sys.executable)
    with node_with(tmp_path, python, python3=python3) as connection:
        upload_code([connection.host], archive, place, lambda host: connection)
    assert (tmp_path / f"burst/code/{archive.code_id}.zip").read_bytes() == archive.data


def test_node_without_a_python_that_burst_can_use_is_refused_by_name(tmp_path: Path) -> None:
    place = CodeFolder(str(tmp_path / "burst/code"), False)
    with (
        node_with(tmp_path, "/nowhere/python", python3=OLD) as connection,
        pytest.raises(CodeError, match=r"n1: .*burst needs Python 3\.9 or newer as python3, or as cluster\.python"),
    ):
        upload_code([connection.host], CodeArchive("0" * 64, b"x"), place, lambda host: connection)


def test_python3_is_asked_where_it_will_do(tmp_path: Path) -> None:
    with node_with(tmp_path, "/nowhere/python", python3=f'exec {sys.executable} "$@"') as connection:
        assert survey_node(connection, [ANSWER], timeout_s=20).section("t.answer").document() == [True, None]
        with contextlib.closing(NodeProgram(connection)) as program:
            status = {"folder": str(tmp_path), "node": "n1", "wait_s": 0.0}
            assert program.ask(status, silence_s=20)[0]["status"]["phase"] == "none"


@pytest.mark.needs("ssh")
def test_python_of_the_image_is_not_looked_for_on_nodes() -> None:
    bare = ClusterConfig(python="/opt/python")
    container = replace(bare, container=ContainerConfig(runtime="docker", image="burst:1"))
    found = [resolve_hosts(["n1"], cluster)[0].python for cluster in (bare, container)]
    assert found == ["/opt/python", None]


def test_wrapper_that_was_checked_is_what_runs_ranks(tmp_path: Path) -> None:
    write_program(tmp_path / "wrapper", WRAPPER)
    with node_with(tmp_path, str(tmp_path / "wrapper"), python3=None) as connection:
        probe = survey_node(connection, [SOFTWARE], timeout_s=20)
    software = read_software(NodeFacts(probe, ClusterConfig()))
    assert software is not None
    assert software.executable == str(tmp_path / "wrapper"), "sys.executable is what the wrapper runs, not the wrapper"
    assert os.access(software.executable, os.X_OK)
