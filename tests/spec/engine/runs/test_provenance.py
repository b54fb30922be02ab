from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from testkit.needs import require

from engine.runs.record import CODE_ROOT, MAX_DIFF_CHARACTERS, collect_provenance, git_facts


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    require("git")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # whoever runs the tests may sign all commits
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-b", "trunk")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_clean_checkout_is_reported_by_its_commit(checkout: Path) -> None:
    facts = git_facts(checkout) or {}
    assert len(facts["sha"]) == 40
    assert facts["branch"] == "trunk"
    assert facts["dirty"] is False
    assert facts["diff"] == ""
    assert facts["status"] == []


def test_changed_checkout_is_reported_with_its_diff(checkout: Path) -> None:
    (checkout / "new.py").write_text("y = 3\n")
    (checkout / "code.py").write_text("x = 2\n")
    facts = git_facts(checkout) or {}
    assert facts["dirty"] is True
    assert facts["status"] == [" M code.py", "?? new.py"]
    assert "+x = 2" in facts["diff"]


def test_diff_is_cut_beyond_its_limit(checkout: Path) -> None:
    (checkout / "code.py").write_text("x = 2\n")
    room = MAX_DIFF_CHARACTERS - len((git_facts(checkout) or {})["diff"])
    for more, is_cut in ((room, False), (room + 1, True)):
        (checkout / "code.py").write_text(f"x = {'2' * more}2\n")
        facts = git_facts(checkout) or {}
        assert len(facts["diff"]) == MAX_DIFF_CHARACTERS
        assert facts["diff_truncated"] == is_cut


def test_a_folder_inside_another_checkout_is_not_that_checkout(checkout: Path) -> None:
    (checkout / "site-packages").mkdir()
    assert git_facts(checkout / "site-packages") is git_facts(Path("/")) is None


@pytest.fixture
def provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Collected beside a GPU whose name is no UTF-8, inside an image."""
    (tmp_path / "nvidia-smi").write_bytes(b'#!/bin/sh\necho "GPU\xff, 80 MiB, 1.2"\necho "$*" >&2\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BURST_IMAGE", "sha256:1234")
    return collect_provenance()


def test_provenance_is_of_the_folder_of_the_packages(provenance: dict[str, Any]) -> None:
    assert {"engine", "cluster", "burst_cli"} <= {path.name for path in CODE_ROOT.iterdir()}
    assert provenance["git"] == git_facts(CODE_ROOT)


def test_provenance_names_command_folder_image_time(provenance: dict[str, Any]) -> None:
    assert provenance["command"] == sys.argv
    assert provenance["cwd"] == str(Path.cwd())
    assert provenance["image"] == "sha256:1234"
    assert provenance["collected_at"].endswith("Z")


def test_provenance_names_versions_of_packages(provenance: dict[str, Any]) -> None:
    packages = {"burst-train", "torch", "numpy", "safetensors", "tokenizers", "pyyaml", "flash-attn", "triton"}
    assert set(provenance["versions"]) == {"python", *packages}
    assert provenance["versions"]["python"] == platform.python_version()
    assert provenance["versions"]["numpy"] == np.__version__


def test_provenance_names_the_hardware(provenance: dict[str, Any]) -> None:
    hardware = provenance["hardware"]
    assert hardware["host"] == socket.gethostname()
    assert hardware["platform"] == platform.platform()
    assert hardware["cores"] == os.cpu_count()
    assert hardware["gpus"] == ["GPU\ufffd, 80 MiB, 1.2"]
    assert hardware["memory_bytes"] == psutil.virtual_memory().total
    assert f": {hardware['cpu']}\n" in Path("/proc/cpuinfo").read_text()
