"""What was decided, and by which rule, as values. Only the command line puts them into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Rule(StrEnum):
    """Why a setting has its value."""

    CONFIGURED = "configured"  # the configuration, or the preset that it names, says so
    FASTEST = "fastest"  # by prediction, of all that are legal
    FASTEST_THAT_FITS = "fastest that fits"  # by prediction, of all that are legal and have the memory they need
    NEAREST_TO_FIT = "nearest to fit"  # nothing fits: the one that lacks least memory


@dataclass(frozen=True)
class Decision:
    """One setting that the configuration left open, or might have.

    Attributes:
        setting: dotted key of the setting.
        value: as it is typed.
        rule: why it has that value.
        figures: what was compared or counted, by name; units are in the names.
        candidates: all that it was chosen from, the chosen one first, each with a `to_dict`. Not part of what ranks
            read, so a decision that was read back has none.
    """

    setting: str
    value: str
    rule: Rule
    figures: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[Any, ...] = field(default=(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the candidates."""
        return {"setting": self.setting, "value": self.value, "rule": self.rule.value, "figures": dict(self.figures)}


def decision_from_dict(values: Mapping[str, Any]) -> Decision:
    """The decision that `Decision.to_dict` wrote."""
    return Decision(str(values["setting"]), str(values["value"]), Rule(values["rule"]), dict(values["figures"]))
