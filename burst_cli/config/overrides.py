"""What is wrong with an override before anything is composed. Pure functions, no Hydra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burst_cli.config.conf_dirs import Option
from engine.config.schema import Problem, known_keys, nearest, unknown_key
from engine.config.settings import RunConfig

Groups = Mapping[str, Mapping[str, Option]]
KNOWN_KEYS = known_keys(RunConfig)


@dataclass(frozen=True)
class Override:
    """One positional override, parsed: `+train.steps=50` has the sign +, the key train.steps and the value 50."""

    given: str
    sign: str
    key: str
    value: Any
    is_sweep: bool

    @property
    def is_delete(self) -> bool:
        """Whether it takes a setting or a group choice away: `~key`."""
        return self.sign == "~"

    def is_choice(self, groups: Groups) -> bool:
        """Whether it chooses a file of a group (`exp=tiny`) and sets no value itself."""
        return self.key.partition("@")[0] in groups

    def hydra_line(self, groups: Groups) -> str:
        """The override as Hydra must read it.

        Files name few of the settings; ++ lets Hydra set one that no file names. Unknown keys never come this far.
        """
        return self.given if self.is_choice(groups) else f"++{self.given.lstrip('+')}"


def grammar_problem(given: str, detail: str) -> Problem:
    """The problem of a text that is no override at all."""
    if "=" not in given.lstrip("="):
        return Problem((), f"{given!r}: expected KEY=VALUE or GROUP=OPTION, such as train.steps=50 or exp=tiny")
    advice = "put a value with special characters in quotes, such as \"key='a b'\""
    return Problem((), f"{given!r}: not in the grammar of overrides ({detail}); {advice}")


def override_problem(override: Override, groups: Groups) -> Problem | None:
    """What is wrong with one override, None when it may be composed."""
    key, given = override.key, override.given
    if override.is_sweep:
        return Problem(
            (key,), f"{given}: a list of values is a sweep, and one run takes one value; {_one_value_advice(override)}"
        )
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return Problem((key,), f"{given}: settings of Hydra itself have no effect here; leave it out")
    if override.is_choice(groups):
        return _choice_problem(override, groups)
    if key not in KNOWN_KEYS:
        return unknown_key(key, (*KNOWN_KEYS, *(group for group in groups if group not in KNOWN_KEYS)))
    if override.is_delete and "=" in given:
        return Problem((key,), f"{given}: to take a setting back to its default write ~{key}")
    if override.sign == "+":
        return Problem((key,), f"{given}: this setting exists already; write it without the +: {given[1:]}")
    return None


def _one_value_advice(override: Override) -> str:
    if override.key == "data.paths":
        return "several paths need brackets: data.paths=[a,b]"
    return "give one value, or quote it if the comma belongs to it"


def _choice_problem(override: Override, groups: Groups) -> Problem | None:
    """The problem of a group choice: no such option, or something that is no name."""
    group, value = override.key.partition("@")[0], override.value
    options = groups[group]
    if override.is_delete:
        return None
    if not isinstance(value, str) or not value:
        return Problem(
            (group,),
            f"{override.given}: {group} is a group of files and takes the name of one: {', '.join(options)}; "
            f"single settings are written {group}.NAME=VALUE",
        )
    folder, _, name = f"{group}/{value.removesuffix('.yaml')}".rpartition("/")
    if name in groups.get(folder, {}):
        return None
    near = nearest(value, options)
    advice = f"did you mean {group}={near}? " if near else ""
    return Problem(
        (group,), f"{override.given}: {group} has no option {value!r}; {advice}Options: {', '.join(options)}"
    )
