"""What `burst bench machine` measured, as a file: a Machine, with what it was measured on. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError
from engine.config.schema import read_dataclass, to_plain
from engine.planning.time.machine import Machine

PROFILE_VERSION = 1
_AGAIN = "measure it again with `burst bench machine`"


def profile_document(machine: Machine, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a profile; `measured`: date, hardware, versions, and the series behind the figures."""
    return {"profile_version": PROFILE_VERSION, "machine": to_plain(machine), "measured": dict(measured)}


def read_profile(path: Path) -> Machine:
    """The machine in a profile. Raises ConfigError, with all that is wrong with the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"device {path}: cannot be read ({error.strerror}); `burst bench machine` writes it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"device {path}: is no JSON ({error}); {_AGAIN}") from error
    if not isinstance(document, dict) or not isinstance(document.get("machine"), dict):
        raise ConfigError(f"device {path}: is no profile of a machine; `burst bench machine` writes one")
    if document.get("profile_version") != PROFILE_VERSION:
        given = document.get("profile_version")
        raise ConfigError(f"device {path}: is a profile of version {given}, expected {PROFILE_VERSION}; {_AGAIN}")
    return _machine(path, document["machine"])


def _machine(path: Path, values: Mapping[str, Any]) -> Machine:
    figures = [field.name for field in fields(Machine) if field.default is MISSING and field.type == "float"]
    problems = [
        f"{name} is {values.get(name)!r}, expected a number"
        for name in figures
        if not isinstance(values.get(name), int | float)
    ]
    if not problems:
        try:
            machine, found = read_dataclass(Machine, {**values, "name": str(path)})
            problems = [problem.text for problem in found]
        except ConfigError as error:
            problems = list(error.problems)
    if problems:
        raise ConfigError([f"device {path}: {problem}; {_AGAIN}" for problem in problems])
    assert isinstance(machine, Machine)
    return machine
