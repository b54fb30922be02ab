"""Files of one's own: read as they are written, and told of with file, line and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.command_line import Burst, Result

HEAD = "# @package _global_\n"


def config(burst: Burst, folder: Path, text: str, *more: str) -> Result:
    """What `burst config` makes of exp/mine.yaml."""
    (folder / "exp").mkdir(exist_ok=True)
    (folder / "exp" / "mine.yaml").write_text(text, encoding="utf-8")
    return burst("config", "exp=mine", "--config-dir", str(folder), "--json", *more)


BAD_DEFAULTS = [
    ("tiny", "line 2: defaults: expected a list"),
    (
        "\n  - /model: small",
        "line 3: defaults: the root file chooses a model already; write `- override /model: small`",
    ),
    ("\n  - override model: small", "groups begin with a slash: write `- override /model: small`"),
    ("\n  - model: small", "groups begin with a slash: write `- override /model: small`"),
    ("\n  - override /modle: small", "there is no group 'modle'; did you mean `- override /model: small`?"),
    ("\n  - override /model: smal", "there is no option 'model/smal'; did you mean small?"),
    ("\n  - override /model=small", "expected the name of a file, or `override /GROUP: OPTION`"),
    ("\n  - tinny", "there is no file exp/tinny.yaml; did you mean tiny?"),
    ("\n  - mine", "'mine' is this file itself"),
    ("\n  - override /model: small\n  - tiny", "line 4: defaults: 'tiny' stands behind a line with `override`"),
    ("\n  - _self_\n  - _self_", "line 4: defaults: '_self_' is there twice"),
    ("\n  - 5", "line 3: defaults: expected a name or one `GROUP: OPTION`"),
    ("", "defaults: expected a list"),
]


@pytest.mark.parametrize(("defaults", "words"), BAD_DEFAULTS)
def test_bad_defaults_are_told_with_file_and_line(burst: Burst, tmp_path: Path, defaults: str, words: str) -> None:
    result = config(burst, tmp_path, f"{HEAD}defaults: {defaults}\n")
    assert (result.code, f"{tmp_path}/exp/mine.yaml, line " in result.err) == (2, True), result.err
    assert words in result.err


def test_files_that_name_each_other_are_refused(burst: Burst, tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "other.yaml").write_text(f"{HEAD}defaults: [mine]\n")
    result = config(burst, tmp_path, f"{HEAD}defaults: [other]\n")
    assert (result.code, "name each other" in result.err) == (2, True), result.err


def test_a_byte_order_mark_changes_nothing(burst: Burst, tmp_path: Path) -> None:
    result = config(burst, tmp_path, f"\ufeff{HEAD}defaults: [tiny]\ntrain: {{seq_len: 128}}\n")
    assert result.document["config"]["train"]["seq_len"] == 128, result.err


@pytest.mark.parametrize("text", ["12:00:00", "'12:00:00'"])
def test_a_limit_of_time_needs_no_quotes(burst: Burst, tmp_path: Path, text: str) -> None:
    mine = f"{HEAD}defaults: [tiny]\ncluster:\n  slurm:\n    time_limit: {text}\n"
    result = config(burst, tmp_path, mine)
    assert result.document["config"]["cluster"]["slurm"]["time_limit"] == "12:00:00", result.err


def test_off_is_the_word_in_a_file(burst: Burst, tmp_path: Path) -> None:
    assert config(burst, tmp_path, f"{HEAD}data:\n  bos: off\n").document["config"]["data"]["bos"] == "off"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train: {seq_len: 0100}", "got the text '0100'; write 100 (or 64"),
        ("data: {text_field: 1_000}", "got the number 1_000; put it in quotes: text_field: '1_000'"),
        ("train: {compile: no}", "got the text 'no'; write false"),
        ("train: {steps: 2k}", "got the text '2k'; write 2000"),
        ("seed: -1_0", "line 2: -1_0"),
    ],
)
def test_a_message_shows_what_the_file_says(burst: Burst, tmp_path: Path, line: str, words: str) -> None:
    result = config(burst, tmp_path, f"{HEAD}{line}\n")
    assert (result.code, "mine.yaml, line 2" in result.err, words in result.err) == (2, True, True), result.err


def test_an_override_is_shown_as_it_was_typed(burst: Burst) -> None:
    assert "\"data.text_field='1_000'\"" in burst("config", "data.text_field=1_000").err


def test_secrets_of_the_environment_are_not_shown(burst: Burst, tmp_path: Path) -> None:
    result = config(burst, tmp_path, f"{HEAD}cluster: {{environment: ['A B=hunter2']}}\n")
    assert (result.code, "hunter2" in result.err) == (2, False), result.err


def test_a_dotted_key_in_a_file_is_answered_with_sections(burst: Burst, tmp_path: Path) -> None:
    result = config(burst, tmp_path, f"{HEAD}defaults: [tiny]\ntrain.steps: 30\n")
    assert "train.steps: a key of a file has no dots; write `train: {steps: ...}`" in result.err, result.err
    assert "mine.yaml, line 3" in result.err, result.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: [steps]", "line 3: train: expected a table of settings, got a list"),
        ("train:\n  checkpoint: [1]", "line 4: train.checkpoint: expected a table of settings, got a list"),
    ],
)
def test_a_list_in_place_of_a_section_is_refused_with_its_line(
    burst: Burst, tmp_path: Path, text: str, words: str
) -> None:
    result = config(burst, tmp_path, f"{HEAD}defaults: [tiny]\n{text}\n")
    assert result.code == 2, result.err
    assert words in result.err
