"""The engine of this machine, whose images are pushed; DOCKER_HOST says which one, as for every docker command."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable

from cluster.errors import ClusterError
from cluster.image.node.engine import Engine, EngineError
from cluster.image.node.identity import image_identity, layers_of
from cluster.image.store import Store, StoredImage
from cluster.remote_text import one_line
from engine.errors import ConfigError


def engine_words(command: str) -> tuple[str, ...]:
    """`cluster.container.command` as words. Raises ConfigError for one that cannot be split or is empty."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"cluster.container.command={command!r}: {error}") from error
    if not words:
        raise ConfigError("cluster.container.command is empty; expected a command line such as docker")
    return words


def _full_name(name: str, tags: list[str]) -> str:
    """`name` with its tag, as nodes shall know the image; raises ClusterError for an image that has no name."""
    if name in tags:
        return name
    if not tags:
        raise ClusterError(f"{name} has no name that nodes could know it by; give it one: docker tag {name} NAME:TAG")
    if "@" in name or re.fullmatch(r"(sha256:)?[0-9a-f]{6,64}", name):
        return tags[0]
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


class LocalImage:
    """Image `name` as the local engine has it. Raises ClusterError when the engine does not answer or has no such."""

    def __init__(self, command: tuple[str, ...], name: str) -> None:
        self._command = command
        if name.startswith("-") or not name.strip() or any(char.isspace() for char in name):
            raise ConfigError(f"{one_line(name, 60)!r} is no image name; expected NAME:TAG")
        try:
            found = Engine(command).inspect(name)
        except EngineError as error:
            raise ClusterError(f"the local engine ({shlex.join(command)}): {one_line(str(error))}") from error
        if found is None:
            raise ClusterError(
                f"the local engine has no image {name!r}; build it with `burst image build`, or name one of "
                f"`{shlex.join(command)} image ls`"
            )
        self._image_id = str(found["Id"])
        self.name = _full_name(name, [str(tag) for tag in found.get("RepoTags") or ()])
        self.identity = image_identity(found)
        self.diff_ids = tuple(layers_of(found))
        self.size_bytes = int(found.get("Size") or 0)

    def export(self, store: Store, on_bytes: Callable[[int], None] = lambda size: None) -> StoredImage:
        """The image in `store`, exported now unless it is there already."""
        return store.find(self.identity, self.name) or self._save(store, on_bytes)

    def _save(self, store: Store, on_bytes: Callable[[int], None]) -> StoredImage:
        # By its id: the name may have moved on to another image since it was looked at.
        process = subprocess.Popen(
            [*self._command, "save", "--", self._image_id], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            image = store.add(process.stdout, self.identity, self.name, on_bytes)
        except ClusterError as error:
            process.kill()
            said = one_line(process.stderr.read())
            raise ClusterError(f"cannot export {self.name}: {said or error}") from error
        finally:
            if process.poll() is None:
                process.stdout.close()
            with process:
                pass
        return image
