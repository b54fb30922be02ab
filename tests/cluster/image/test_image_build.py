from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from testkit import ROOT

from cluster.errors import ClusterError
from cluster.image.build import (
    CONTEXT,
    BuildPlan,
    BuildSettings,
    build_build_plan,
    run_build,
    write_context,
)
from engine.config.errors import ConfigError

COMMIT = {"sha": "a" * 40, "dirty": False}
# An engine that keeps the context it is sent and answers `image inspect`.
ENGINE = """#!/bin/sh
case $1 in
build) echo 'Step 1/1 : FROM nothing'; cat >"$(dirname "$0")/context.tar"; exit {code} ;;
image) echo '[{{"Id": "sha256:1234", "Size": 4096, "RepoTags": ["burst:test"]}}]' ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout."""
    root = tmp_path / "checkout"
    for name in CONTEXT:
        if "." in name or name.isupper() or name == "Dockerfile":
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
        else:
            (root / name).mkdir(parents=True)
            (root / name / "__init__.py").write_text("x = 1\n")
    return root


def fake_engine(folder: Path, code: int = 0) -> str:
    script = folder / "engine"
    script.write_text(ENGINE.format(code=code))
    script.chmod(0o755)
    return str(script)


def plan_of(root: Path, *, command: str = "docker", **settings: object) -> BuildPlan:
    return build_build_plan(root, BuildSettings("burst:test", **settings), COMMIT, command)  # type: ignore[arg-type]


def names_in(files: BuildPlan) -> list[str]:
    stream = io.BytesIO()
    write_context(files.files, stream)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        return archive.getnames()


def test_context_holds_the_sources_and_nothing_that_lies_beside_them(checkout: Path) -> None:
    (checkout / "runs").mkdir()
    (checkout / "runs/secret").write_text("secret")
    (checkout / "engine/__pycache__").mkdir()
    (checkout / "engine/__pycache__/x.pyc").write_text("x")
    (checkout / "docker/wheels").mkdir()
    (checkout / "docker/wheels/old.whl").write_text("x")
    names = names_in(plan_of(checkout))
    assert {"engine/__init__.py", "Dockerfile", "constraints.txt"} <= set(names)
    assert not [name for name in names if "runs" in name or "pycache" in name or "wheels" in name]


def test_same_files_give_the_same_command_and_any_change_another(checkout: Path) -> None:
    before = plan_of(checkout)
    (checkout / "engine/__init__.py").touch()
    assert plan_of(checkout).argv == before.argv
    (checkout / "engine/__init__.py").write_text("x = 2\n")
    assert plan_of(checkout).argv != before.argv
    (checkout / "engine/__init__.py").write_text("x = 1\n")
    (checkout / "engine/__init__.py").chmod(0o755)
    assert plan_of(checkout).argv != before.argv


def test_labels_hold_commit_and_digest(checkout: Path) -> None:
    labels = plan_of(checkout, device="cpu").labels
    assert labels["org.opencontainers.image.revision"] == COMMIT["sha"]
    assert labels["org.burst.dirty"] == "false"
    assert labels["org.burst.device"] == "cpu"
    assert re.fullmatch(r"[0-9a-f]{64}", labels["org.burst.context-sha256"])


def test_wheels_lie_in_the_context_and_keep_apt_out(checkout: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.whl").write_text("wheel")
    plan = plan_of(checkout, wheels=wheels)
    assert "docker/wheels/torch-2.whl" in names_in(plan)
    assert "APT_PACKAGES=" in plan.argv
    assert "APT_PACKAGES=g++" in plan_of(checkout, wheels=wheels, apt_packages="g++").argv


def test_folder_without_wheels_is_refused(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.whl file in it; fill it with `pip wheel"):
        plan_of(checkout, wheels=tmp_path)


def test_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
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


def test_failing_build_shows_what_the_engine_said(checkout: Path, tmp_path: Path) -> None:
    plan = plan_of(checkout, command=fake_engine(tmp_path, code=7))
    with pytest.raises(ClusterError, match=r"exit code 7:\n  Step 1/1 : FROM nothing"):
        run_build(plan, "burst:test", lambda line: None)


def test_missing_engine_says_what_to_install(checkout: Path, tmp_path: Path) -> None:
    plan = plan_of(checkout, command=str(tmp_path / "nothing"))
    with pytest.raises(ClusterError, match="install Docker, or name another engine by --command"):
        run_build(plan, "burst:test", lambda line: None)


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
