"""`burst config`: what people read and what programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import yaml

from burst_cli.compose import compose
from engine.config.schema import walk_fields
from engine.config.settings import LayoutName, PresetName, RunConfig, config_fingerprint, config_from_dict


def test_output_is_yaml_that_spells_the_same_configuration(burst) -> None:
    result = burst("config", "exp=llama8b_1m")
    assert result.code == 0
    assert config_from_dict(yaml.safe_load(result.out)) == compose(["exp=llama8b_1m"]).config


def test_each_line_names_its_source_in_one_column(burst) -> None:
    lines = burst("config", "exp=tiny", "train.steps=77").out.splitlines()
    by_name = {line.split(":")[0].strip(): line for line in lines}
    assert by_name["steps"].endswith("# train.steps=77")
    assert by_name["preset"].endswith("# conf/attention/burst.yaml")
    assert by_name["z_loss"].endswith("# default")
    assert len({line.index(" # ") for line in lines if " # " in line}) == 1


def test_json_holds_values_sources_and_fingerprint(burst) -> None:
    document = json.loads(burst("config", "exp=small", "seed=3", "--json").out)
    config = config_from_dict(document["config"])
    assert config.seed == 3
    assert document["fingerprint"] == config_fingerprint(config)
    assert document["overrides"] == ["exp=small", "seed=3"]
    assert set(document["sources"]) == {spec.key for spec in walk_fields(RunConfig)}
    assert document["sources"]["seed"] == "seed=3"


def test_groups_lists_every_option_with_its_description(burst, tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\n# My own [bold] one.\n")
    result = burst("config", "--groups", "--config-dir", str(tmp_path))
    assert "My own [bold] one." in result.out
    document = json.loads(burst("config", "--groups", "--json", "--config-dir", str(tmp_path)).out)
    assert set(document["groups"]) == {"exp", "model", "attention", "memory", "train", "data", "cluster"}
    assert [option["name"] for option in document["groups"]["attention"]] == sorted(get_args(PresetName))


def test_fields_documents_every_setting(burst) -> None:
    shown = burst("config", "--fields").out
    fields = {field["key"]: field for field in json.loads(burst("config", "--fields", "--json").out)["fields"]}
    for spec in walk_fields(RunConfig):
        assert spec.key in shown
        assert fields[spec.key]["doc"], spec.key
    assert fields["train.seq_len"]["unit"] == "tokens"
    assert fields["optimizer.beta1"]["bounds"] == "0 or more, below 1"
    assert fields["attention.layout"]["legal"] == [*get_args(LayoutName), "null"]
