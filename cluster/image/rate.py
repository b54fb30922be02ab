"""Rates as people write them: 50MB/s, 400mbit."""

from __future__ import annotations

import re

from engine.config.errors import ConfigError

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]?)(i?b|bit)(?:/s)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}


def parse_rate(text: str, option: str = "--limit") -> float:
    """Bytes per second of `50MB/s`, `50MiB/s` or `400mbit`. Raises ConfigError."""
    found = _RATE.fullmatch(text.strip())
    rate = 0.0
    if found is not None:
        number, prefix, unit = found.groups()
        base = 1024 if unit.lower() == "ib" else 1000
        rate = float(number) * base ** _POWERS[prefix.lower()] / (8 if unit.lower() == "bit" else 1)
    if rate <= 0:
        raise ConfigError(f"{option} {text!r}: expected a rate such as 50MB/s, 50MiB/s or 400mbit")
    return rate
