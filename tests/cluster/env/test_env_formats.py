"""What is written is what comes out again, by a real shell and a real container; files are private and whole."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from testkit.image_rig import busybox_tree, launcher_engine

from cluster.env.facts import EnvironmentVariable, NodeEnvironment
from cluster.env.formats import Format, render_environment, write_environments
from cluster.errors import ClusterError

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
    assert by_shell(render_environment(environment(*values), Format.sh), names) == values


@pytest.mark.parametrize("value", SPLIT)
def test_dotenv_refuses_line_ends_and_says_what_can_say_them(value: str) -> None:
    with pytest.raises(ClusterError, match=r"--format dotenv cannot say V0=.*--format sh"):
        render_environment(environment(value), Format.dotenv)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("value", ["a\0b", "\udcff"])
def test_no_format_says_nul_or_broken_unicode(form: Format, value: str) -> None:
    with pytest.raises(ClusterError, match="NUL characters and broken Unicode"):
        render_environment(environment(value), form)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("name", ["", "1A", "A B", "A\nB", "A=B", "$(id)", "Ä"])
def test_names_that_no_shell_knows_are_refused(form: Format, name: str) -> None:
    odd = NodeEnvironment("node1", (EnvironmentVariable(name, "x", "why"),))
    with pytest.raises(ClusterError, match="is no name of a variable"):
        render_environment(odd, form)


@pytest.mark.parametrize("form", list(Format))
def test_a_hostile_reason_or_node_stays_within_its_comment(form: Format) -> None:
    odd = NodeEnvironment("node1\nEVIL=1", environment("x", reason="because\nEVIL=1\r\nexport EVIL=1").variables)
    lines = render_environment(odd, form).splitlines()
    assert not [line for line in lines if line.strip().startswith(("EVIL", "export EVIL"))]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("form", "name"), [(Format.sh, "n1.sh"), (Format.dotenv, "n1.env")])
def test_each_node_gets_a_file_of_its_own_for_its_owner_only(tmp_path: Path, form: Format, name: str) -> None:
    before = os.umask(0)
    try:
        files = write_environments({"n1": environment("x"), "n2": environment("x")}, tmp_path / "a" / "env", form)
    finally:
        os.umask(before)
    assert files["n1"] == tmp_path / "a" / "env" / name
    assert len(list(files["n1"].parent.iterdir())) == 2
    assert {mode(path) for path in files.values()} == {0o600}
    assert mode(tmp_path / "a" / "env") == 0o700


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_environments({"n1": environment("x")}, tmp_path, Format.dotenv)
    assert mode(tmp_path) == 0o755


def test_a_value_that_cannot_be_said_leaves_no_file_at_all(tmp_path: Path) -> None:
    environments = {"n1": environment("x"), "n2": environment("a\nb")}
    with pytest.raises(ClusterError):
        write_environments(environments, tmp_path / "env", Format.dotenv)
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize("node", ["../n1", "-n1", "a/b", "", "a b", "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, node: str) -> None:
    with pytest.raises(ClusterError, match="cannot be the name of a file"):
        write_environments({node: environment("x")}, tmp_path / "env", Format.sh)
    assert not (tmp_path / "env").exists()


def test_writing_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "n1.env").symlink_to(tmp_path / "precious")
    write_environments({"n1": environment("x")}, tmp_path, Format.dotenv)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "n1.env").is_symlink()


def test_dotenv_round_trips_through_a_real_container(tmp_path: Path) -> None:
    (tmp_path / "node1.env").write_text(render_environment(environment(*HOSTILE), Format.dotenv), encoding="utf-8")
    with launcher_engine() as engine:
        engine.import_tree("rig/busybox:1", busybox_tree())
        command = ["run", "--rm", "--network=none", "--env-file", str(tmp_path / "node1.env"), "rig/busybox:1"]
        found = engine(*command, "/bin/busybox", "cat", "/proc/self/environ").split("\0")
    assert {f"V{index}={value}" for index, value in enumerate(HOSTILE)} <= set(found)
