"""Decisions about open settings, and the rule behind each, as values. The command line formats them as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Rule(StrEnum):
    """Why a setting has its value."""

    CONFIGURED = "configured"  # set by the configuration or by its preset
    FASTEST = "fastest"  # of all legal choices, by prediction
    FASTEST_THAT_FITS = "fastest that fits"  # of all legal choices that fit into memory, by prediction
    NEAREST_TO_FIT = "nearest to fit"  # no choice fits: the smallest shortage of memory


@dataclass(frozen=True)
class Decision:
    """The value of one setting that may be left open, and why it was selected.

    Attributes:
        setting: Dotted key of the setting.
        value: Its value, as a user would type it.
        rule: Why it has that value.
        figures: Compared or counted figures by name; units are in the names.
        candidates: All candidates, the selected one first, each with a `to_dict`. Not written to resolved.json, so
            empty in a decision that was read back.
    """

    setting: str
    value: str
    rule: Rule
    figures: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[Any, ...] = field(default=(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the candidates."""
        return {"setting": self.setting, "value": self.value, "rule": self.rule.value, "figures": dict(self.figures)}


def decision_from_dict(values: Mapping[str, Any]) -> Decision:
    """Return the decision that `Decision.to_dict` wrote."""
    return Decision(str(values["setting"]), str(values["value"]), Rule(values["rule"]), dict(values["figures"]))
