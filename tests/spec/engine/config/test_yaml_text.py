"""YAML of configurations: scalars mean what they mean on the command line."""

from __future__ import annotations

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from engine.config.yaml_text import ConfigDumper, load_yaml, written_values, yaml_problem

# What YAML 1.1 makes other values of, and what is a number in both.
SCALARS = [
    "12:00:00",
    "no",
    "off",
    "yes",
    "on",
    "0100",
    "007",
    "1_000",
    "1__0",
    "1e5",
    "1e-4",
    ".5",
    "-.5",
    "1.",
    "00.5",
]
SCALARS += ["2026-01-01", "0x10", "0o17", "0b1", "1:30", "True", "NULL", "+5", "0", "0.0", "1_0.5", "y", "n", "5_"]


@pytest.mark.parametrize("text", SCALARS)
def test_a_scalar_of_a_file_is_what_it_is_in_an_override(text: str) -> None:
    """The oracle is Hydra's own parser."""
    expected = OverridesParser.create().parse_override(f"key={text}").value()
    found = load_yaml(f"key: {text}")["key"]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("text", ["~", "", "null"])
def test_null_has_the_spellings_of_yaml(text: str) -> None:
    assert load_yaml(f"key: {text}") == {"key": None}


@given(st.one_of(st.sampled_from(SCALARS), st.text("0123456789_.:eE+-xoXnoyes~=<", max_size=6)))
def test_dumped_text_reads_back_in_every_yaml_version(text: str) -> None:
    dumped = yaml.dump({"key": text}, Dumper=ConfigDumper)
    assert load_yaml(dumped)["key"] == text, dumped
    assert yaml.safe_load(dumped)["key"] == text, dumped


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: duplicate key a, which line 1 has too"),
        ("a:\n\tb: 1\n", "line 2: a tab; YAML indents with blanks"),
        ("a: !!timestamp 2026-01-01\n", "leave the tag (!...) out"),
        ("a: *b\n", "line 1: found undefined alias"),
        ("a: 1\nb: {c: 1\n", "line 2: "),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(text: str, words: str) -> None:
    with pytest.raises(yaml.YAMLError) as raised:
        load_yaml(text)
    assert words in yaml_problem(raised.value, text)


def test_a_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="contains itself"):
        written_values("a: &x [*x]\n")


def test_written_values_have_line_numbers() -> None:
    found = written_values("a: 1_000\nb:\n  - 'x'\n  - no\n", "mine.yaml")
    assert {key: (one.line, one.text) for key, one in found.items()} == {
        "a": (1, "1_000"),
        "b": (3, None),
        "b[0]": (3, None),
        "b[1]": (4, None),
    }
