"""`pip install .` gives a whole `burst`: the wheel alone runs from any folder, configuration files included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = "import sys; from burst_cli.app import main; sys.exit(main())"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, capture_output=True, timeout=200)
    (wheel,) = folder.glob("burst_train-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def burst(installed: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the wheel's `burst` in `home`. -S: the editable install of this checkout stays out of sight."""
    others = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(installed), *others]),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "xdg"),
    }
    command = [sys.executable, "-S", "-P", "-c", RUN, *arguments]
    return subprocess.run(command, env=environment, cwd=home, text=True, capture_output=True, timeout=200)


def test_wheel_composes_its_own_configuration_in_any_folder(installed: Path, tmp_path: Path) -> None:
    result = burst(installed, tmp_path, "config", "exp=tiny", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["config"]["attention"]["preset"] == "burst"
    groups = json.loads(burst(installed, tmp_path, "config", "--groups", "--json").stdout)["groups"]
    assert groups["exp"][0]["path"].startswith(str(installed / "burst_cli" / "conf"))


def test_wheel_plans_a_launch_in_any_folder(installed: Path, tmp_path: Path) -> None:
    result = burst(installed, tmp_path, "launch", "exp=tiny", "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["world_size"] == 4
    assert Path(plan["path"]).is_relative_to(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_wheel_writes_a_report_page(installed: Path, tmp_path: Path) -> None:
    result = burst(installed, tmp_path, "report", "--output", "report.html")
    assert result.returncode == 0, result.stderr
    assert "burst report: no runs" in (tmp_path / "report.html").read_text()


def test_wheel_holds_configuration_licence_and_image_files_and_no_tests(installed: Path) -> None:
    packaged = {path.relative_to(installed / "burst_cli/conf") for path in installed.glob("burst_cli/conf/**/*.yaml")}
    assert packaged == {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").glob("**/*.yaml")}
    assert (installed / "burst_cli/docker/entrypoint.sh").read_bytes() == (ROOT / "docker/entrypoint.sh").read_bytes()
    (metadata,) = installed.glob("burst_train-*.dist-info")
    assert (metadata / "licenses/LICENSE").is_file()
    assert "burst = burst_cli.app:main" in (metadata / "entry_points.txt").read_text()
    tops = {path.name for path in installed.iterdir()}
    assert tops == {"burst_cli", "cluster", "engine", metadata.name}
