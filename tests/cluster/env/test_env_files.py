"""Environment files: private, whole, and written only when every node's text can be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster.env.facts import EnvironmentVariable, NodeEnvironment
from cluster.env.files import write_environments
from cluster.env.formats import Format, UnsayableError
from cluster.errors import ClusterError


def environment(node: str, value: str = "=eth0") -> NodeEnvironment:
    return NodeEnvironment(node, (EnvironmentVariable("NCCL_SOCKET_IFNAME", value, "why"),))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("form", "name"),
    [(Format.SH, "n1.sh"), (Format.DOTENV, "n1.env")],
)
def test_each_node_gets_a_file_of_its_own_for_its_owner_only(tmp_path: Path, form: Format, name: str) -> None:
    files = write_environments({"n1": environment("n1"), "n2": environment("n2")}, tmp_path / "a" / "env", form)
    assert files["n1"] == tmp_path / "a" / "env" / name
    assert len(list(files["n1"].parent.iterdir())) == 2
    assert {mode(path) for path in files.values()} == {0o600}
    assert mode(tmp_path / "a" / "env") == 0o700


def test_a_lenient_umask_opens_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = write_environments({"n1": environment("n1")}, tmp_path / "env", Format.DOTENV)
    finally:
        os.umask(before)
    assert mode(files["n1"]) == 0o600
    assert mode(tmp_path / "env") == 0o700


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_environments({"n1": environment("n1")}, tmp_path, Format.DOTENV)
    assert mode(tmp_path) == 0o755


def test_a_value_that_cannot_be_said_leaves_no_file_at_all(tmp_path: Path) -> None:
    environments = {"n1": environment("n1"), "n2": environment("n2", "a\nb")}
    with pytest.raises(UnsayableError):
        write_environments(environments, tmp_path / "env", Format.DOTENV)
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize("node", ["../n1", "-n1", "a/b", "", "a b", "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, node: str) -> None:
    with pytest.raises(ClusterError, match="cannot be the name of a file"):
        write_environments({node: environment(node)}, tmp_path / "env", Format.SH)
    assert not (tmp_path / "env").exists()


def test_writing_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "n1.env").symlink_to(tmp_path / "precious")
    write_environments({"n1": environment("n1")}, tmp_path, Format.DOTENV)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "n1.env").is_symlink()
