"""Building the image: which files go to the engine, which labels say where they come from, and the one command.

The build context is made here and sent as a tar stream, so that the same files give the same layers whatever lies
beside them, and wheels from anywhere can be put into it for machines without network.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from cluster.errors import ClusterError
from cluster.image.local import LocalImage
from cluster.remote_text import clean_text
from engine.config.errors import ConfigError
from engine.runs.files import hash_file

Device = Literal["cuda", "cpu"]
Files = Mapping[str, Path]  # by their names in the build context
CONTEXT = (
    "burst_cli",
    "engine",
    "cluster",
    "conf",
    "docker",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "Dockerfile",
)
WHEELS_FOLDER = "docker/wheels"
_LEFT_OUT = frozenset({"__pycache__", "wheels"})
_LAST_LINES = 20


@dataclass(frozen=True)
class BuildSettings:
    """What a person may choose. wheels: a folder of wheels; pip then looks nowhere else, and no package of Debian is
    added unless `apt_packages` names it. network: of the steps (`docker build --network`)."""

    tag: str
    device: Device = "cuda"
    base: str | None = None
    wheels: Path | None = None
    apt_packages: str | None = None
    network: str | None = None
    no_cache: bool = False


@dataclass(frozen=True)
class BuildPlan:
    """One build: the command, which reads the context from its stdin, and the files of the context by their names."""

    argv: tuple[str, ...]
    labels: Mapping[str, str]
    files: Files

    @property
    def context_bytes(self) -> int:
        """Size of all files."""
        return sum(source.stat().st_size for source in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what --dry-run prints."""
        return {
            "command": list(self.argv),
            "labels": dict(self.labels),
            "context_bytes": self.context_bytes,
            "files": list(self.files),
        }


def build_build_plan(root: Path, settings: BuildSettings, git: Mapping[str, Any] | None, command: str) -> BuildPlan:
    """The build of the checkout at `root`; `command` is the engine's command line, `git` its commit when it is known.

    Raises ConfigError when `root` is no checkout of burst or the folder of wheels has none.
    """
    missing = [name for name in CONTEXT if not (root / name).exists()]
    if missing:
        raise ConfigError(
            f"{root}: not a checkout of burst, {', '.join(missing)} is not there; name one by --context FOLDER"
        )
    files = {**_source_files(root), **_wheel_files(settings.wheels)}
    labels = _labels(files, settings, git)
    arguments = _build_arguments(settings)
    argv = (
        command,
        "build",
        "--tag",
        settings.tag,
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
        *(("--network", settings.network) if settings.network else ()),
        *(("--no-cache",) if settings.no_cache else ()),
        "-",
    )
    return BuildPlan(argv, labels, files)


def run_build(plan: BuildPlan, tag: str, on_line: Callable[[str], None]) -> LocalImage:
    """The image, built; `on_line` is told every line that the engine prints. Raises ClusterError with the last ones."""
    environment = os.environ | {"BUILDKIT_PROGRESS": "plain"}
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with tempfile.TemporaryFile() as context:
        write_context(plan.files, context)
        context.seek(0)
        try:
            process = subprocess.Popen(
                plan.argv, stdin=context, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            text = f"{plan.argv[0]}: cannot be started ({error.strerror}); install Docker, or name another engine"
            raise ClusterError(f"{text} by --command") from error
    assert process.stdout is not None
    with process:
        try:
            for raw in process.stdout:
                line = clean_text(raw, limit=2000).rstrip()
                last.append(line)
                on_line(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        shown = "\n  ".join(line for line in last if line.strip())
        raise ClusterError(f"{plan.argv[0]} build ended with exit code {process.returncode}:\n  {shown}")
    return LocalImage(plan.argv[:1], tag)


def _context_digest(files: Files) -> str:
    """SHA-256 over names, modes and contents of the files: equal exactly when the build context is."""
    total = hashlib.sha256()
    for name, source in files.items():
        total.update(f"{name}\0{_is_executable(source)}\0{hash_file(source)}\n".encode())
    return total.hexdigest()


def write_context(files: Files, stream: IO[bytes]) -> None:
    """The files as a tar archive; owner and times are constant, so that the engine's cache sees contents only."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, source in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = source.stat().st_size, 0o755 if _is_executable(source) else 0o644
            with source.open("rb") as content:
                archive.addfile(entry, content)


def _source_files(root: Path) -> Files:
    found = {}
    for path in (root / name for name in CONTEXT):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            relative = file.relative_to(root)
            if file.is_file() and _LEFT_OUT.isdisjoint(relative.parts) and file.suffix != ".pyc":
                found[relative.as_posix()] = file
    return found


def _wheel_files(folder: Path | None) -> Files:
    if folder is None:
        return {}
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ConfigError(
            f"--wheels {folder}: no *.whl file in it; fill it with "
            "`pip wheel -w FOLDER -c constraints.txt '.[parquet,tensorboard]' hatchling`"
        )
    return {f"{WHEELS_FOLDER}/{wheel.name}": wheel for wheel in wheels}


def _is_executable(source: Path) -> bool:
    return bool(source.stat().st_mode & 0o100)


def _labels(files: Files, settings: BuildSettings, git: Mapping[str, Any] | None) -> dict[str, str]:
    """Where the image comes from. No time: building the same files again gives the same image."""
    labels = {
        "org.opencontainers.image.title": "burst",
        "org.burst.image": "1",
        "org.burst.device": settings.device,
        "org.burst.context-sha256": _context_digest(files),
    }
    if git is not None:
        labels["org.opencontainers.image.revision"] = str(git["sha"])
        labels["org.burst.dirty"] = str(bool(git["dirty"])).lower()
    return labels


def _build_arguments(settings: BuildSettings) -> dict[str, str]:
    arguments: dict[str, str] = {"DEVICE": settings.device}
    if settings.base is not None:
        arguments["BASE"] = settings.base
    if settings.apt_packages is not None:
        arguments["APT_PACKAGES"] = settings.apt_packages
    elif settings.wheels is not None:
        arguments["APT_PACKAGES"] = ""
    return arguments
