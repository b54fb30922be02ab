"""What is written is what comes out again, by a real shell and a real container."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from testkit.image_rig import busybox_tree, launcher_engine

from cluster.env.plan import EnvironmentVariable, Format, NodeEnvironment, render_environment
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


@pytest.mark.parametrize(
    ("form", "value", "words"),
    [
        *((Format.dotenv, value, r"--format dotenv cannot say V0=.*--format sh") for value in SPLIT),
        *((form, value, "NUL characters and broken Unicode") for form in Format for value in ("a\0b", "\udcff")),
    ],
)
def test_what_a_format_cannot_say_is_refused(form: Format, value: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        render_environment(environment(value), form)


@pytest.mark.parametrize("form", list(Format))
def test_a_hostile_reason_or_node_stays_within_its_comment(form: Format) -> None:
    odd = NodeEnvironment("node1\nEVIL=1", environment("x", reason="because\nEVIL=1\r\nexport EVIL=1").variables)
    lines = render_environment(odd, form).splitlines()
    assert not [line for line in lines if line.strip().startswith(("EVIL", "export EVIL"))]


def test_dotenv_round_trips_through_a_real_container(tmp_path: Path) -> None:
    (tmp_path / "node1.env").write_text(render_environment(environment(*HOSTILE), Format.dotenv), encoding="utf-8")
    with launcher_engine() as engine:
        engine("import", "-", "rig/busybox:1", stdin=busybox_tree())
        command = ["run", "--rm", "--network=none", "--env-file", str(tmp_path / "node1.env"), "rig/busybox:1"]
        found = engine(*command, "/bin/busybox", "cat", "/proc/self/environ").split("\0")
    assert {f"V{index}={value}" for index, value in enumerate(HOSTILE)} <= set(found)
