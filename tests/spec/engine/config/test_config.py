"""The configuration as dataclasses: reading, writing, mistakes, fingerprint."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from testkit import ROOT
from testkit.typed_settings import cases, config, values_of

from engine.config.errors import ConfigError
from engine.config.schema import JsonObject, read_dataclass, to_plain, walk_fields
from engine.config.settings import (
    CheckpointKind,
    Dtype,
    LayoutName,
    PresetName,
    RunConfig,
    config_from_dict,
    dump_config,
    load_config,
)
from engine.runs.record import config_fingerprint

SPECS = {spec.key: spec for spec in walk_fields(RunConfig)}


def problems_of(values: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    return caught.value.problems


def test_settings_are_documented() -> None:
    assert not [key for key, spec in SPECS.items() if not spec.note.doc]


def test_defaults_of_settings_are_legal() -> None:
    for key, spec in SPECS.items():
        if isinstance(spec.default, (int, float)) and not isinstance(spec.default, bool):
            assert spec.note.admits(spec.default), key
        assert spec.choices is None or spec.default is None or spec.default in spec.choices, key


@pytest.mark.parametrize(
    ("key", "legal"),
    [
        ("train.compile", ("true", "false")),
        ("train.steps", ()),
        ("train.compute_dtype", get_args(Dtype)),
        ("memory.activation_checkpoint", (*get_args(CheckpointKind), "auto")),
    ],
)
def test_legal_values_are_those_of_the_type(key: str, legal: tuple[str, ...]) -> None:
    assert SPECS[key].legal_values() == legal


def test_a_table_of_json_values_equals_its_copy_whatever_the_order_of_its_keys() -> None:
    tables = [JsonObject({"a": 1, "b": {"c": [None]}}), JsonObject({"b": {"c": [None]}, "a": 1})]
    assert len(set(tables)) == 1, "equal tables must have one hash"
    assert to_plain(tables[0]) == {"a": 1, "b": {"c": [None]}}


def test_a_table_that_json_cannot_hold_is_refused() -> None:
    _, problems = read_dataclass(RunConfig, {"model": {"hf_config": {"a": float("nan")}}})
    assert [problem.keys for problem in problems] == [("model.hf_config",)]


def test_yaml_text_round_trips(tmp_path: Path) -> None:
    config = replace(
        RunConfig(),
        train=replace(RunConfig().train, profile="2:4", peak_flops_per_device=1e12),
        data=replace(RunConfig().data, format="text", paths=("a b.txt", "ü: #*.txt"), text_field="no"),
    )
    assert config_from_dict({}) == config_from_dict({"train": None}) == RunConfig()
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config
    assert path.read_text(encoding="utf-8").startswith("exp: tiny\nseed: 0\nmodel:\n  name: tiny\n")  # as declared


# A setting as it is typed | what it is then.
READ = cases("""
train.steps=5.0 | 5
train.steps=1e3 | 1000
train.seq_len=128K | 131072
data.length_buckets=[4K, 1M] | (4096, 1048576)
optimizer.learning_rate=1e-4 | 0.0001
optimizer.learning_rate=1 | 1.0
optimizer.max_grad_norm=null | None
data.paths=[a, b] | ('a', 'b')
attention.layout=zigzag | 'zigzag'
train.profile="3:5" | '3:5'
cluster.container.run_options=[--ipc=host] | ('--ipc=host',)
cluster.container.run_options=null | None
""")


@pytest.mark.parametrize("case", READ)
def test_values_are_read_as_people_write_them(case: str) -> None:
    setting, read = case.split(" | ")
    found: object = config(setting)
    for name in setting.partition("=")[0].split("."):
        found = getattr(found, name)
    assert repr(found) == read


# A setting as it is typed | what is said of it.
MISTAKES = cases(f"""
train.steps=many | train.steps: expected a whole number, got the text 'many'
train.steps=1K | train.steps: expected a whole number, got the text '1K'; write 1000
train.steps=1.5 | train.steps: expected a whole number, got the number 1.5
train.steps=true | train.steps: expected a whole number, got the truth value true
train.steps=null | train.steps: expected a whole number, got null
train.steps={{a: 3}} | train.steps: expected a whole number, got a table with a
train.steps=[1] | train.steps: expected a whole number, got the list [1]
train.steps=2026-01-02 | train.steps: expected a whole number, got datetime.date(2026, 1, 2)
train.steps={2**63} | train.steps: expected a whole number, got the number {2**63}
optimizer.beta1=high | optimizer.beta1: expected a number, got the text 'high'
train.compile="yes" | train.compile: expected true or false, got the text 'yes'; write true
model.name=7 | model.name: expected text, got the number 7; put it in quotes: "model.name='7'"
train.profile=3:5 | train.profile: expected text or null, got the number 185; put it in quotes: "train.profile='185'"
data.paths=a | data.paths: expected a list, each item text, got the text 'a'; put it in brackets: data.paths=[a]
data.paths=[a, {{}}] | data.paths[1]: expected text, got a table with nothing in it
model=3 | model: expected a table of settings, got the number 3
train.seqlen=3 | train.seqlen: no such setting; did you mean train.seq_len?
trian.steps=3 | trian: no such setting; did you mean train?
seq_len=3 | seq_len: no such setting; did you mean train.seq_len?
loss.wheels=3 | loss.wheels: no such setting; loss has chunk_tokens, z_loss
wheels=3 | wheels: no such setting; `burst config --fields` lists every setting
data.bos="on" | data.bos=on: no such value any more; data.bos=auto takes the template (post_processor) in
    tokenizer.json: add the token there
attention.preset=brust | attention.preset: 'brust' is not a legal value; legal: {", ".join(get_args(PresetName))};
    did you mean burst?
attention.layout=x | attention.layout: 'x' is not a legal value; legal: {", ".join(get_args(LayoutName))}, null
""")


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named_with_what_was_expected(case: str) -> None:
    setting, text = case.split(" | ")
    assert problems_of(values_of(setting)) == (text,)
    assert read_dataclass(RunConfig, values_of(setting))[0] == RunConfig()  # a mistaken field has its default


# Settings of earlier versions, as files of earlier runs have them: what is so without them.
EARLIER = """
    cluster.expected.driver=null cluster.ssh.fan_out=64 cluster.machine.forward_flops_per_s=null
    cluster.machine.backward_flops_per_s=null cluster.machine.shared_nic=null cluster.machine.intra_bytes_per_s=null
    cluster.machine.inter_bytes_per_s=null cluster.machine.host_bytes_per_s=null cluster.slurm.partition=null
    cluster.slurm.account=null cluster.slurm.qos=null cluster.slurm.constraint=null cluster.slurm.exclude=null
    cluster.slurm.cpus_per_node=null model.rope_scaling.attention_factor=null model.rope_scaling.beta_fast=32.0
    model.rope_scaling.beta_slow=1.0 model.rope_scaling.low_freq_factor=1.0 model.rope_scaling.high_freq_factor=4.0
    parallel.reshard_after_forward=true train.checkpoint.keep_every_steps=null train.guard.most_in_a_row=5
    train.guard.window_steps=64 train.log_interval_steps=1 train.warmup_metric_steps=3
"""


def test_files_of_earlier_runs_say_what_is_so_without_the_setting() -> None:
    assert config("cluster.name=anything") == RunConfig()
    for setting in EARLIER.split():
        assert config(setting) == RunConfig(), setting
        key = setting.partition("=")[0]
        (problem,) = problems_of(values_of(f"{key}=another"))
        assert problem.startswith(f"{key}: no such setting any more; "), problem


def test_all_mistakes_are_reported_together() -> None:
    values = {"modle": {}, "train": {"steps": "x", "seqlen": 3}, "attention": {"preset": "y"}, "data": 4}
    keys = [problem.partition(":")[0] for problem in problems_of(values)]
    assert keys == ["modle", "attention.preset", "train.seqlen", "train.steps", "data"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read this configuration: No such file"),
        (b"train: {steps: 4", "not readable as YAML"),
        (b"\xff\xfe\x00", "not readable as YAML"),
        (b"- a\n- b", "expected a table of settings"),
        (b"", "expected a table of settings"),
        (b"train: {steps: x}", "train.steps: expected a whole number"),
        (b"!!python/object/apply:os.getcwd []", "not readable as YAML"),
        (b"[" * 100_000, "not readable as YAML"),
        (b"- " * 100_000, "not readable as YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_fingerprint_is_equal_exactly_for_equal_configurations() -> None:
    prints = {config_fingerprint(RunConfig())}
    for spec in SPECS.values():
        other = {bool: not spec.default, int: 7, float: 0.123, str: "other"}.get(type(spec.default))
        if spec.choices is not None:
            other = next(choice for choice in spec.choices if choice != spec.default)
        if other is not None:
            prints.add(config_fingerprint(config(f"{spec.key}={json.dumps(other)}")))
    changed = [spec for spec in SPECS.values() if spec.choices or isinstance(spec.default, (bool, int, float, str))]
    assert len(prints) == 1 + len(changed)
    assert config_fingerprint(config_from_dict(to_plain(RunConfig()))) in prints


def test_ranks_need_neither_hydra_nor_torch_to_read_a_configuration() -> None:
    code = (
        "import sys, engine.resolve.rules; from engine.config.settings import *;"
        "from engine.runs.record import config_fingerprint;"
        "print(config_fingerprint(RunConfig()), *sys.modules)"
    )
    fingerprint, *modules = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split()
    assert fingerprint == config_fingerprint(RunConfig())  # the same in every process
    loaded = {name.partition(".")[0] for name in modules}
    assert loaded.isdisjoint({"torch", "numpy", "hydra", "omegaconf", "typer", "rich", "paramiko"})
