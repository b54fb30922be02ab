from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

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


def test_a_checkout_tells_its_commit_and_what_was_changed_and_cuts_what_is_huge(checkout: Path) -> None:
    facts = git_facts(checkout) or {}
    assert len(facts["sha"]) == 40
    assert facts["branch"] == "trunk"
    assert facts["dirty"] is False
    assert facts["diff"] == ""
    assert facts["status"] == []
    (checkout / "new.py").write_text("y = 3\n")
    (checkout / "code.py").write_text("x = 2\n")
    room = MAX_DIFF_CHARACTERS - len((git_facts(checkout) or {})["diff"])
    for more, is_cut in ((room, False), (room + 1, True)):
        (checkout / "code.py").write_text(f"x = {'2' * more}2\n")
        facts = git_facts(checkout) or {}
        assert facts["dirty"] is True
        assert facts["status"] == [" M code.py", "?? new.py"]
        assert "+x = 2" in facts["diff"]
        assert len(facts["diff"]) == MAX_DIFF_CHARACTERS
        assert facts["diff_truncated"] == is_cut


def test_folder_inside_somebody_elses_checkout_is_not_that_checkout(checkout: Path) -> None:
    (checkout / "site-packages").mkdir()
    assert git_facts(checkout / "site-packages") is git_facts(Path("/")) is None


def test_what_a_run_comes_from_is_told_of_the_folder_of_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_bytes(b'#!/bin/sh\necho "GPU\xff, 80 MiB, 1.2"\necho "$*" >&2\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BURST_IMAGE", "sha256:1234")
    found = collect_provenance()
    assert {"engine", "cluster", "burst_cli"} <= {path.name for path in CODE_ROOT.iterdir()}
    hardware, versions = found.pop("hardware"), found.pop("versions")
    assert found.pop("collected_at").endswith("Z")
    where = {"command": sys.argv, "cwd": str(Path.cwd()), "git": git_facts(CODE_ROOT), "image": "sha256:1234"}
    assert found == where
    packages = ["burst-train", "torch", "numpy", "safetensors", "tokenizers", "pyyaml", "flash-attn", "triton"]
    assert list(versions) == ["python", *packages]
    assert versions["python"] == platform.python_version()
    assert versions["numpy"] == np.__version__
    cpu, memory_bytes = hardware.pop("cpu"), hardware.pop("memory_bytes")
    assert hardware == {
        **{"host": socket.gethostname(), "platform": platform.platform(), "cores": os.cpu_count()},
        "gpus": ["GPU\ufffd, 80 MiB, 1.2"],
    }
    assert any(line.endswith(f": {cpu}") for line in Path("/proc/cpuinfo").read_text().splitlines())
    assert memory_bytes == psutil.virtual_memory().total
