"""The Dockerfile as it is, built without network upon a base image made of this machine's Python."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from testkit import ROOT
from testkit.host_tree import write_host_tree
from testkit.image_rig import LauncherEngine, launcher_engine

BASE, TAG = "host-python:test", "burst:test"
pytestmark = pytest.mark.thorough

PATH = "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def collect_wheels(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder)]
    command += ["-c", str(ROOT / "constraints.txt"), f"{ROOT}[parquet,tensorboard]", "hatchling"]
    subprocess.run(command, check=True, capture_output=True, timeout=280)


def copy_checkout(folder: Path) -> None:
    """The files of a build and more, so that a change of one does not touch the tree under test; for our eyes only."""
    for name in ("Dockerfile", ".dockerignore", *re.findall("^!(.*)", (ROOT / ".dockerignore").read_text(), re.M)):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    (folder / "docker/entrypoint.sh").chmod(0o600)
    (folder / "runs").mkdir()


def build(engine: LauncherEngine, checkout: Path) -> list[str]:
    """The image's layers, by `burst image build`."""
    command = [sys.executable, "-m", "burst_cli", "image", "build", "--tag", TAG, "--device", "cpu", "--json"]
    command += ["--context", str(checkout), "--", "--network", "none", "--build-arg", f"BASE={BASE}"]
    environment = {**os.environ, "DOCKER_HOST": engine.host, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    (shown,) = json.loads(engine("image", "inspect", json.loads(done.stdout)["id"]))
    return list(shown["RootFS"]["Layers"])


@pytest.mark.timeout(900)
def test_image_is_built_without_network_and_a_change_of_code_changes_one_layer(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    copy_checkout(checkout)
    collect_wheels(checkout / "docker/wheels")
    with launcher_engine() as engine:
        tree = io.BytesIO()
        write_host_tree(tree)
        engine("import", "--change", PATH, "-", BASE, stdin=tree.getvalue())
        before = build(engine, checkout)
        run = ("run", "--rm", "--network", "none", TAG)
        assert engine(*run, "id", "-un") == "burst"
        assert "NCCL" not in engine(*run, "env")
        assert engine(*run, "python", "-c", "import torch; print(torch.ones(2).sum().item())") == "2.0"
        assert engine(*run, "burst", "--version").startswith("burst ")

        with (checkout / "engine/config/errors.py").open("a") as file:
            file.write("\nCHANGED = True\n")
        after = build(engine, checkout)
        assert engine(*run, "python", "-c", "from engine.config.errors import CHANGED; print(CHANGED)") == "True"
    differing = [index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    assert differing == [len(before) - 1]
