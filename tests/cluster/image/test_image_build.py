"""What a build tells the engine, which is a shell script here, and what the files of a build hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_image_plan import INSPECTED
from testkit import ROOT, write_program

from cluster.errors import ClusterError
from cluster.image.build import build_command, run_build
from engine.config.errors import ConfigError

COMMIT = {"sha": "a" * 40, "dirty": False}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout."""
    (tmp_path / "docker/wheels").mkdir(parents=True)
    (tmp_path / "Dockerfile").touch()
    return tmp_path


def test_the_engine_is_told_device_commit_and_what_a_person_adds(checkout: Path) -> None:
    words = build_command(checkout, "podman", "a:1", "cpu", ("--no-cache",), COMMIT)
    labels = f"org.burst.image=1 org.opencontainers.image.revision={COMMIT['sha']} org.burst.dirty=false".split()
    assert words[:4] == ("podman", "build", "--tag", "a:1")
    assert [words[place + 1] for place, word in enumerate(words) if word == "--label"] == labels
    assert words[-4:] == ("--build-arg", "DEVICE=cpu", "--no-cache", str(checkout))


def test_wheels_keep_apt_out_unless_a_person_says_so(checkout: Path) -> None:
    (checkout / "docker/wheels/torch-2.whl").touch()
    words = build_command(checkout, "docker", "a:1", "cuda", ("--build-arg", "APT_PACKAGES=g++"), None)
    assert [word for word in words if word.startswith("APT")] == ["APT_PACKAGES=", "APT_PACKAGES=g++"]


def test_what_cannot_be_built_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="not a checkout of burst, it has no Dockerfile"):
        build_command(tmp_path, "docker", "a:1", "cuda", (), None)
    with pytest.raises(ClusterError, match="build ended with exit code 7"):
        run_build(("sh", "-c", "echo Step 1/1; exit 7"))
    assert capfd.readouterr() == ("", "Step 1/1\n")
    with pytest.raises(ClusterError, match="install Docker, or name another engine by --command"):
        run_build((str(tmp_path / "none"),))


def test_build_as_a_person_types_it(checkout: Path, burst) -> None:
    shown = {**INSPECTED, "Id": "sha256:12", "Size": 4096}
    engine = write_program(checkout / "engine", f"[ $1 = build ] || echo '[{json.dumps(shown)}]'")
    words = ("image", "build", "--tag", "a:1", "--context", str(checkout), "--command", str(engine))
    assert burst(*words, "--json").document == {"image": "a:1", "id": "sha256:12", "size_bytes": 4096}
    planned = burst(*words, "--dry-run", "--", "--pull", "--debug")  # which is not ours
    assert (planned.code, planned.out.split()[-3:]) == (0, ["--pull", "--debug", str(checkout)])
    usual = burst("image", "build", "--dry-run", "--json").document["command"]
    assert (usual[:4], usual[-1]) == (["docker", "build", "--tag", "burst:latest"], str(ROOT))
    assert "DEVICE=cuda" in usual
    next_step = "a:1: 4 KiB, sha256:12\nnext: burst image push --image a:1 cluster=NAME\n"
    assert burst(*words) == (0, next_step, "")


def test_an_image_has_pinned_parts_and_sources_alone_and_ends_as_an_ordinary_user() -> None:
    kept, text = (ROOT / ".dockerignore").read_text().split(), (ROOT / "Dockerfile").read_text()
    assert kept[0] == "*"
    assert {line for line in kept if not line.startswith("!")} == {"*", "**/__pycache__"}
    assert re.search(r"^ARG BASE=python:[\d.]+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.M)
    assert re.findall(r"^USER (\w+)$", text, re.M)[-1] == "burst"
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}", "torch", "packages"}
    assert not re.search(r"^[^#\n]*(NCCL_|GLOO_|UCX_|MASTER_ADDR|--index-url)", text, re.M)


def test_requirements_are_those_of_the_project_but_torch() -> None:
    command = [sys.executable, ROOT / "docker/requirements.py", ROOT / "pyproject.toml", "torch", "parquet"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "pyyaml>=6.0" in lines
    assert "pyarrow>=15" in lines
    assert not [line for line in lines if line.startswith("torch")]


def test_install_script_refuses_an_unknown_device(tmp_path: Path) -> None:
    script = (
        (ROOT / "docker/install.sh").read_text().replace("/opt/burst", str(tmp_path)).replace("/build", str(tmp_path))
    )
    (tmp_path / "install.sh").write_text(script.replace("python3 -m venv", "true"))
    command = [shutil.which("sh") or "sh", tmp_path / "install.sh", "torch", "tpu", "url"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "DEVICE=tpu: expected cuda or cpu" in result.stderr
