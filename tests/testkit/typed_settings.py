"""Configurations from settings as they are typed, and tables of such, one case a line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from engine.config.settings import RunConfig, config_from_dict


def values_of(settings: str) -> dict[str, Any]:
    """The tables that `train.steps=5 & data.paths=[a, b]` spells."""
    values: dict[str, Any] = {}
    for key, _, value in (setting.partition("=") for setting in settings.split(" & ") if setting):
        *sections, name = key.split(".")
        table = values
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = yaml.safe_load(value)
    return values


def config(settings: str = "") -> RunConfig:
    """The defaults with these settings."""
    return config_from_dict(values_of(settings))


def cases(text: str) -> list[str]:
    """One a line; what is indented belongs to the line before."""
    return re.sub(r"\n +", " ", text).strip().splitlines()
