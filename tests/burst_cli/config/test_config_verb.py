"""`burst config`: what people read and what programs read."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import yaml
from testkit.command_line import Burst

from burst_cli.compose import compose
from engine.config.schema import walk_fields
from engine.config.settings import LayoutName, PresetName, RunConfig, config_from_dict
from engine.runs.record import config_fingerprint


def test_config_prints_yaml(burst: Burst) -> None:
    code, out, _ = burst("config", "exp=llama8b_1m")
    assert (code, config_from_dict(yaml.safe_load(out))) == (0, compose(["exp=llama8b_1m"]).config)


def test_yaml_names_the_source_of_each_value(burst: Burst) -> None:
    lines = burst("config", "exp=tiny", "train.steps=77").out.splitlines()
    by_name = {line.split(":")[0].strip(): line for line in lines}
    sources = {"steps": "train.steps=77", "preset": "conf/attention/burst.yaml", "z_loss": "default"}
    assert {name: by_name[name].rpartition("  # ")[2] for name in sources} == sources
    assert len({line.index(" # ") for line in lines if " # " in line}) == 1
    assert lines[0].startswith("exp: tiny ")


def test_document_of_config(burst: Burst) -> None:
    document = burst("config", "exp=small", "seed=3", "--json").document
    config = config_from_dict(document["config"])
    assert (config.seed, document["fingerprint"]) == (3, config_fingerprint(config))
    assert document["overrides"] == ["exp=small", "seed=3"]
    assert set(document["sources"]) == {spec.key for spec in walk_fields(RunConfig)}
    assert (document["sources"]["seed"], document["sources"]["loss.z_loss"]) == ("seed=3", "default")


def test_all_options_have_descriptions(burst: Burst, tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\n# My own [bold] one.\n")
    words = ("config", "--groups", "--fields", "--config-dir", str(tmp_path))
    shown, document = burst(*words).out, burst(*words, "--json").document
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    path = str(tmp_path / "exp" / "mine.yaml")
    assert rows[0] == "group option what it is file"
    assert f"mine My own [bold] one. {path}" in rows
    assert {"name": "mine", "description": "My own [bold] one.", "path": path} in document["groups"]["exp"]
    first, second, *_ = (one["description"] for one in document["groups"]["memory"])
    assert rows[rows.index(f"memory attn_out {first} built-in") + 1] == f"attn_out_every {second} built-in"
    assert set(document["groups"]) == {"exp", "model", "attention", "memory", "train", "data", "cluster"}
    assert [option["name"] for option in document["groups"]["attention"]] == sorted(get_args(PresetName))
    fields = {field["key"]: field for field in document["fields"]}
    for spec in walk_fields(RunConfig):
        assert (spec.key in shown, bool(fields[spec.key]["doc"])) == (True, True), spec.key
    assert fields["loss.chunk_tokens"] == {
        **{"key": "loss.chunk_tokens", "type": "a whole number", "default": 2048, "legal": None, "bounds": "1 or more"},
        **{"unit": "tokens", "doc": "rows of logits computed together"},
    }
    assert "(top): the run" in rows
    place = rows.index("loss.chunk_tokens = 2048 a whole number, 1 or more, in tokens")
    assert rows[place + 1] == "rows of logits computed together"
    assert fields["optimizer.beta1"]["bounds"] == "0 or more, below 1"
    layouts = [*get_args(LayoutName), "null"]
    assert fields["attention.layout"]["legal"] == layouts


def test_fields_takes_a_section_or_a_word(burst: Burst) -> None:
    for words, inside, outside in [
        (["loss"], "loss.z_loss", "train.steps"),
        (["learning"], "optimizer.schedule", "model.name"),
        (["loss", "qk_norm"], "model.qk_norm", "train.steps"),
    ]:
        shown = burst("config", "--fields", *words).out
        assert (inside in shown, outside in shown) == (True, False), words
    document = burst("config", "--fields", "rope_scaling.kind", "--json").document
    assert [field["key"] for field in document["fields"]] == ["model.rope_scaling.kind"]


def test_fields_without_a_match_says_what_the_word_means_here(burst: Burst) -> None:
    result = burst("config", "--fields", "num_train_epochs")
    assert (result.code, "train.steps" in result.err) == (2, True)


def test_fields_are_at_most_100_columns_wide_in_a_pipe(burst: Burst) -> None:
    assert max(map(len, burst("config", "--fields").out.splitlines())) <= 100
