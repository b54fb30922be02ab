"""The container engine of a node, through its command line. Python 3.6, standard library only."""

import json
import os
import shutil
import subprocess
from typing import Any, Dict, List, Optional, Sequence

from cluster.image.node.identity import image_identity, layers_of

LABEL = "org.burst.image"
_AT_ONCE = 100
_TIMEOUT_S = 60.0


class EngineError(Exception):
    """The engine does not answer, or refused."""


class Engine:
    """`command` is the engine's command line, such as ["docker"]."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    def call(self, *words: str, **options: Any) -> str:
        """What `docker WORDS` prints. Raises EngineError with what it says on stderr."""
        environment = dict(os.environ, LC_ALL="C")
        try:
            done = subprocess.run(  # capture_output came with Python 3.7
                self.command + list(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                timeout=options.get("timeout_s", _TIMEOUT_S),
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"{self.command[0]} {words[0]} did not answer in time") from None
        except OSError as error:
            raise EngineError(f"cannot run {self.command[0]}: {error.strerror}") from error
        if done.returncode:
            text = " ".join(done.stderr.decode("utf-8", "replace").split())
            raise EngineError(text[-400:] or f"{words[0]} ended with {done.returncode}")
        return done.stdout.decode("utf-8", "replace")

    def info(self) -> Dict[str, Any]:
        """Version, folder and kind of store; `partial` says whether it takes archives without the layers it has."""
        facts = json.loads(self.call("info", "--format", "{{json .}}"))
        errors = facts.get("ServerErrors")
        if errors or not facts.get("ServerVersion"):
            raise EngineError("; ".join(errors or ["the engine's daemon does not answer"]))
        containerd = "io.containerd.snapshotter" in json.dumps(facts.get("DriverStatus") or [])
        return {
            "version": str(facts["ServerVersion"]),
            "root": str(facts.get("DockerRootDir") or ""),
            "partial": not containerd,
        }

    def inspect(self, name: str) -> Optional[Dict[str, Any]]:
        """What the engine knows about image `name`; None if it has no such image."""
        try:
            found = json.loads(self.call("image", "inspect", "--", name))
        except EngineError as error:
            if "no such image" in str(error).lower():
                return None
            raise
        return dict(found[0])

    def images(self) -> List[Dict[str, Any]]:
        """What it knows about every image it has, intermediate ones included: their layers can be built upon, too."""
        ids = sorted(set(self.call("image", "ls", "--all", "--quiet", "--no-trunc").split()))
        found: List[Dict[str, Any]] = []
        for start in range(0, len(ids), _AT_ONCE):
            found += json.loads(self.call("image", "inspect", "--", *ids[start : start + _AT_ONCE]))
        return found

    def have(self, name: str, identity: str, layers: Sequence[str]) -> Dict[str, Any]:
        """How much of an image is there: `identity` under its name, `same` (an id) under any, layers from below."""
        named = self.inspect(name)
        if named is not None and image_identity(named) == identity:
            return {"identity": identity, "same": named["Id"], "present": len(layers)}
        present, same = 0, None
        for image in self.images():
            present = max(present, _common(layers_of(image), layers))
            if image_identity(image) == identity:
                same = image["Id"]
        return {"identity": None if named is None else image_identity(named), "same": same, "present": present}

    def remove_labelled(self, repository: str, dry_run: bool) -> List[str]:
        """Names `repository:...` of images with our label that were (or would be) removed; those in use stay.

        The label alone is not enough: whatever somebody builds upon our image inherits it.
        """
        ids = set(self.call("image", "ls", "--quiet", "--no-trunc", "--filter", f"label={LABEL}=1").split())
        removed = []
        for image_id in sorted(ids):
            image = self.inspect(image_id)
            labels = (image or {}).get("Config", {}).get("Labels") or {}
            if image is None or labels.get(LABEL) != "1" or self._is_used(image_id):
                continue
            names = [str(name) for name in image.get("RepoTags") or () if str(name).rpartition(":")[0] == repository]
            removed += [name for name in names if dry_run or self._remove(name)]
        return removed

    def _is_used(self, image_id: str) -> bool:
        """Whether a container, running or not, was made from it."""
        return bool(self.call("ps", "--all", "--quiet", "--filter", f"ancestor={image_id}").strip())

    def _remove(self, name: str) -> bool:
        try:
            self.call("image", "rm", "--", name)
        except EngineError:
            return False
        return True


def free_bytes(path: str) -> Optional[Dict[str, int]]:
    """Free bytes for this user where `path` is or will be, and which file system that is; None if nobody can tell."""
    while path and not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        status, device = os.statvfs(path), os.stat(path).st_dev
    except OSError:
        return None
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return {"bytes": blocks * status.f_frsize, "device": device}


def find_unzstd() -> Optional[str]:
    """How this node unpacks zstd: "zstd", the program; "python", a module; None if it cannot."""
    if shutil.which("zstd"):
        return "zstd"
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return None
    return "python"


def _common(mine: Sequence[str], wanted: Sequence[str]) -> int:
    """Length of the common beginning: a layer counts only upon the same layers below."""
    count = 0
    for one, other in zip(mine, wanted):
        if one != other:
            break
        count += 1
    return count
