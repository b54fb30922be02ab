"""What a node has, as its agent answered: parsed with distrust, a frozen value afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.image.node.blobs import PART
from cluster.remote_text import one_line


@dataclass(frozen=True)
class FreeSpace:
    """Free bytes on one file system; `device` tells whether two folders lie on the same one."""

    bytes: int
    device: int


@dataclass(frozen=True)
class NodeSurvey:
    """What one node has of an image, and what it can do.

    problem: why it cannot get the image at all. present: layers from the bottom up that its engine can build upon.
    same: id of an image that is this one already, whatever its name. takes_partial: the engine loads archives without
    the layers it has. blobs: bytes of packed layers in its cache, by sha256; parts: the same for unfinished ones.
    """

    node: str
    problem: str = ""
    identity: str | None = None
    same: str | None = None
    present: int = 0
    takes_partial: bool = True
    unzstd: bool = False
    has_ssh: bool = False
    has_keys_file: bool = False
    blobs: Mapping[str, int] | None = None
    parts: Mapping[str, int] | None = None
    engine_version: str = ""
    engine_folder: str = ""
    cache_folder: str = ""
    cache_free: FreeSpace | None = None
    engine_free: FreeSpace | None = None


def parse_survey(node: str, answer: Mapping[str, Any]) -> NodeSurvey:
    """The survey in an agent's answer; whatever has another type than it must is a problem of that node."""
    problem = answer.get("engine_error")
    if problem is not None:
        return NodeSurvey(node, problem=f"its container engine: {one_line(str(problem))}")
    try:
        engine, have = _mapping(answer, "engine"), _mapping(answer, "have")
        sizes = {str(name): int(size) for name, size in _mapping(answer, "blobs").items()}
        return NodeSurvey(
            node,
            identity=None if have.get("identity") is None else one_line(str(have["identity"]), 64),
            same=None if have.get("same") is None else one_line(str(have["same"]), 100),
            present=int(have["present"]),
            takes_partial=engine["partial"] is True,
            unzstd=answer.get("unzstd") is not None,
            has_ssh=answer.get("ssh") is True,
            has_keys_file=answer.get("keys_file") is True,
            blobs={name: size for name, size in sizes.items() if not name.endswith(PART)},
            parts={name.removesuffix(PART): size for name, size in sizes.items() if name.endswith(PART)},
            engine_version=one_line(str(engine["version"]), 40),
            engine_folder=one_line(str(engine["root"])),
            cache_folder=one_line(str(answer["cache"])),
            cache_free=_free(answer.get("cache_free")),
            engine_free=_free(answer.get("engine_free")),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return NodeSurvey(node, problem="its agent gave an answer that makes no sense")


def _mapping(answer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = answer[key]
    if not isinstance(value, dict):
        raise TypeError(key)
    return value


def _free(value: Any) -> FreeSpace | None:
    return None if value is None else FreeSpace(int(value["bytes"]), int(value["device"]))
