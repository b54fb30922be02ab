"""What goes into a build and what the engine is told; the engine is a shell script."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from testkit import ROOT

from cluster.errors import ClusterError
from cluster.image.build import CONTEXT, BuildPlan, BuildSettings, build_build_plan, run_build
from engine.config.errors import ConfigError

COMMIT = {"sha": "a" * 40, "dirty": False}
# An engine that keeps the context it is sent and answers `image inspect`.
ENGINE = """#!/bin/sh
case $1 in
build) echo 'Step 1/1 : FROM nothing'; cat >"$(dirname "$0")/context.tar"; exit {code} ;;
image) echo '[{{"Id": "sha256:1234", "Size": 4096, "RepoTags": ["burst:test"]}}]' ;;
esac
"""
SOURCES = {name if "." in name or not name.islower() else f"{name}/__init__.py" for name in CONTEXT}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout, with files in it that are no part of one."""
    root = tmp_path / "checkout"
    for name in (*SOURCES, "runs/secret", "engine/__pycache__/x.pyc", "docker/wheels/old.whl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    return root


def fake_engine(folder: Path, code: int = 0) -> str:
    script = folder / "engine"
    script.write_text(ENGINE.format(code=code))
    script.chmod(0o755)
    return str(script)


def plan_of(root: Path, *, command: str = "docker", **settings: object) -> BuildPlan:
    return build_build_plan(root, BuildSettings("burst:test", **settings), COMMIT, command)  # type: ignore[arg-type]


def test_the_context_holds_the_sources_and_wheels_which_keep_apt_out(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "torch-2.whl").write_text("wheel")
    assert set(plan_of(checkout).files) == SOURCES
    plan = plan_of(checkout, wheels=tmp_path)
    assert set(plan.files) == {*SOURCES, "docker/wheels/torch-2.whl"}
    assert "APT_PACKAGES=" in plan.argv
    assert "APT_PACKAGES=g++" in plan_of(checkout, wheels=tmp_path, apt_packages="g++").argv


def test_same_files_give_the_same_command_and_any_change_another(checkout: Path) -> None:
    before, file = plan_of(checkout), checkout / "engine/__init__.py"
    file.touch()
    assert plan_of(checkout).argv == before.argv
    file.write_text("x = 2\n")
    assert plan_of(checkout).argv != before.argv
    file.write_text("x = 1\n")
    file.chmod(0o755)
    assert plan_of(checkout).argv != before.argv


def test_labels_hold_commit_and_digest(checkout: Path) -> None:
    labels = dict(plan_of(checkout, device="cpu").labels)
    assert re.fullmatch(r"[0-9a-f]{64}", labels.pop("org.burst.context-sha256"))
    assert labels == {
        "org.opencontainers.image.title": "burst",
        "org.opencontainers.image.revision": COMMIT["sha"],
        "org.burst.image": "1",
        "org.burst.dirty": "false",
        "org.burst.device": "cpu",
    }


def test_what_cannot_be_built_is_told_before(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.whl file in it; fill it with `pip wheel"):
        plan_of(checkout, wheels=tmp_path)
    with pytest.raises(ConfigError, match="not a checkout of burst, burst_cli, engine"):
        plan_of(tmp_path)


def test_engine_gets_the_context_on_its_stdin(checkout: Path, tmp_path: Path) -> None:
    (checkout / "engine/__init__.py").chmod(0o755)
    plan = plan_of(checkout, command=fake_engine(tmp_path))
    lines: list[str] = []
    image = run_build(plan, "burst:test", lines.append)
    assert (image.image_id, image.size_bytes, lines) == ("sha256:1234", 4096, ["Step 1/1 : FROM nothing"])
    with tarfile.open(tmp_path / "context.tar") as archive:
        assert archive.getnames() == list(plan.files)
        assert [entry.name for entry in archive if entry.mode == 0o755] == ["engine/__init__.py"]
        assert {(entry.mtime, entry.uid, entry.mode | 0o111) for entry in archive} == {(0, 0, 0o755)}


def test_an_engine_that_fails_or_is_not_there_is_told(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"exit code 7:\n  Step 1/1 : FROM nothing"):
        run_build(plan_of(checkout, command=fake_engine(tmp_path, code=7)), "burst:test", lambda line: None)
    with pytest.raises(ClusterError, match="install Docker, or name another engine by --command"):
        run_build(plan_of(checkout, command=str(tmp_path / "none")), "burst:test", lambda line: None)


def test_dockerfile_is_pinned_and_ends_as_an_ordinary_user() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=python:[\d.]+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.M)
    assert re.findall(r"^USER (\w+)$", text, re.M)[-1] == "burst"
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}", "torch", "packages"}


def test_dockerfile_bakes_no_cluster_settings_in() -> None:
    code = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    assert not re.search(r"NCCL_|GLOO_|UCX_|MASTER_ADDR|--index-url", code)


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
