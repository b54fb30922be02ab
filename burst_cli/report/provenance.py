"""Where a run comes from, as flat keys of its record: {git_sha, dirty, hardware, host, versions, command, ...}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burst_cli.report.values import Record, one_line, text

# The uncommitted changes of a checkout may be a million characters; a line of JSON that starts so is nothing else,
# because a text in JSON holds no line end.
_DIFF = re.compile(rb'^ *"diff": .*\n', re.MULTILINE)
_LARGE_BYTES = 64 * 1024
_LARGEST_BYTES = 16 * 2**20
_VERSIONS = ("burst-train", "torch", "python", "flash-attn", "triton")


def provenance_facts(run_path: Path) -> dict[str, Any]:
    """The facts of RUN/provenance.json, None for what it does not say; never raises.

    hardware is that of the machine that launched: see `with_hardware` for what the ranks themselves said.
    """
    document = _read(run_path / "provenance.json")
    git, hardware, versions = (_table(document, name) for name in ("git", "hardware", "versions"))
    command = document.get("command")
    return {
        "git_sha": text(git, "sha"),
        "dirty": git.get("dirty") if isinstance(git.get("dirty"), bool) else None,
        "host": text(hardware, "host"),
        "launch_hardware": _device(hardware),
        "versions": {name: text(versions, name) for name in _VERSIONS if versions.get(name) is not None} or None,
        "command": one_line(" ".join(map(_without_values, command))) if isinstance(command, list) else None,
        "image": text(document, "image"),
    }


def _without_values(word: object) -> str:
    """A word of a command line; of cluster.environment only which setting it is, for its values may be secrets."""
    key, equals, _ = str(word).partition("=")
    return f"{key}=..." if equals and key.lstrip("+~").startswith("cluster.environment") else str(word)


def with_hardware(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`records` with `hardware`: the device that the ranks found; for runs that died before, that of their sisters.

    A run without summary (it failed, or ran out of memory) belongs to the hardware on which all other runs of its
    experiment, model and ranks were; where those differ, or there are none, the launcher's own is the best guess.
    """
    known: dict[tuple[str | None, ...], set[str]] = {}
    for record in records:
        if (device := text(record, "device")) is not None:
            known.setdefault(_family(record), set()).add(device)
    for record in records:
        sisters = known.get(_family(record), set())
        guess = next(iter(sisters)) if len(sisters) == 1 else record.get("launch_hardware")
        record["hardware"] = text(record, "device") or guess
    return records


def _family(record: Record) -> tuple[str | None, ...]:
    return tuple(text(record, name) for name in ("exp", "model", "world_size"))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return {}
        content = path.read_bytes()
        if len(content) > _LARGE_BYTES:
            content = _DIFF.sub(b"", content)
        document = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _device(hardware: Mapping[str, Any]) -> str | None:
    """The name of its GPUs, `cpu` for a machine without; None when nothing is known."""
    gpus = hardware.get("gpus")
    if not hardware or not isinstance(gpus, list):
        return None
    return one_line(str(gpus[0]).partition(",")[0]) if gpus else "cpu"
