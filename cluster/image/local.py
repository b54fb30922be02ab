"""The engine of this machine, whose images are pushed; DOCKER_HOST says which one, as for every docker command."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

from cluster.errors import ClusterError
from cluster.image.archive import PackedImage, Packing, pack_archive
from cluster.image.node.identity import image_identity, layers_of
from cluster.image.status import read_inspected
from cluster.remote_text import one_line
from engine.config.errors import ConfigError

_TIMEOUT_S = 60.0


def _full_name(name: str, tags: list[str]) -> str:
    """`name` with its tag, as nodes shall know the image; raises ClusterError for an image that has no name."""
    if name in tags:
        return name
    if not tags:
        raise ClusterError(f"{name} has no name that nodes could know it by; give it one: docker tag {name} NAME:TAG")
    if "@" in name or re.fullmatch(r"(sha256:)?[0-9a-f]{6,64}", name):
        return tags[0]
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _inspect(command: tuple[str, ...], name: str) -> dict[str, Any] | None:
    """What the local engine knows about image `name`; None if it has no such image."""
    where = f"the local engine ({shlex.join(command)})"
    try:
        done = subprocess.run([*command, "image", "inspect", "--", name], capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{where}: did not answer in time") from error
    except OSError as error:
        raise ClusterError(f"{where}: cannot run {command[0]}: {error.strerror}") from error
    try:
        return read_inspected(done.returncode, done.stdout, done.stderr)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


class LocalImage:
    """Image `name` as the local engine has it. Raises ClusterError when the engine does not answer or has no such."""

    def __init__(self, command: tuple[str, ...], name: str) -> None:
        self._command = command
        if name.startswith("-") or not name.strip() or any(char.isspace() for char in name):
            raise ConfigError(f"{one_line(name)!r} is no image name; expected NAME:TAG")
        found = _inspect(command, name)
        if found is None:
            raise ClusterError(
                f"the local engine has no image {name!r}; build it with `burst image build`, or name one of "
                f"`{shlex.join(command)} image ls`"
            )
        self.image_id = str(found["Id"])
        self.name = _full_name(name, [str(tag) for tag in found.get("RepoTags") or ()])
        self.identity = image_identity(found)
        self.layers = len(layers_of(found))
        self.size_bytes = int(found.get("Size") or 0)

    def pack(self, packing: Packing) -> PackedImage:
        """The image as blobs of a registry. Raises ClusterError when the engine cannot save it."""
        # By its id: the name may have moved on to another image since it was looked at.
        command = [*self._command, "save", self.image_id]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                return pack_archive(process.stdout, packing)
            except (ClusterError, OSError) as error:
                process.kill()
                said = one_line(process.stderr.read())
                raise ClusterError(f"cannot export {self.name}: {said or error}") from error
            finally:
                process.stdout.close()
