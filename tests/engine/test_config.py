"""The configuration as dataclasses: reading, writing, mistakes, fingerprint."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from engine.config.errors import ConfigError
from engine.config.schema import read_dataclass, to_plain, walk_fields
from engine.config.settings import (
    LayoutName,
    PresetName,
    RunConfig,
    config_fingerprint,
    config_from_dict,
    dump_config,
    load_config,
)

SPECS = {spec.key: spec for spec in walk_fields(RunConfig)}


PRESET_NAMES = ", ".join(get_args(PresetName))


def nested(key: str, value: object) -> dict[str, object]:
    """`a.b` and 1 -> {"a": {"b": 1}}"""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def problems_of(values: dict[str, object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    return caught.value.problems


# Settings that are numbers within bounds, by those.
BOUNDS = {
    "0 or more": """
        seed attention.prefetch_chunks loss.z_loss optimizer.warmup_steps optimizer.weight_decay
        train.eval_needle_depths cluster.max_restarts cluster.slurm.gpus_per_node cluster.kubernetes.gpus_per_pod
        cluster.expected.gpus cluster.expected.hcas
    """,
    "1 or more": """
        model.hidden_size model.ffn_hidden_size model.num_layers model.num_heads model.num_kv_heads
        model.rope_scaling.factor model.rope_scaling.original_seq_len attention.head_parallel_size
        attention.ring_inner_size attention.ring_outer_size attention.chunk_tokens attention.window_tokens
        attention.sink_tokens attention.block_tokens attention.block_stride attention.local_blocks
        memory.every_layers memory.host_layers memory.tile_tokens memory.device_bytes memory.host_bytes
        loss.chunk_tokens parallel.cp_size parallel.dp_shard_size parallel.tp_size parallel.dp_replicate_size
        parallel.message_sms optimizer.decay_steps train.seq_len train.steps train.micro_batch_size
        train.grad_accum_steps train.eval_interval_steps train.eval_samples train.eval_position_buckets
        train.eval_needle_samples train.checkpoint.every_steps data.echo_tokens data.max_bytes cluster.num_nodes
        cluster.ranks_per_node cluster.threads_per_rank cluster.topology_nodes cluster.kubernetes.cpus_per_pod
    """,
    "2 or more": "model.vocab_size model.head_dim train.checkpoint.keep_last",
    "5 or more": "cluster.lease_s",
    "12 or more": "train.checkpoint.stop_grace_s",
    "257 or more": "data.bpe_vocab_size",
    "more than 0": """
        model.rope_theta model.norm_eps model.init_std optimizer.learning_rate optimizer.epsilon
        optimizer.max_grad_norm train.peak_flops_per_device train.checkpoint.every_minutes
        train.guard.spike_deviations cluster.hang_timeout_s cluster.ssh.connect_timeout_s
        cluster.expected.hca_rate_gbps
    """,
    "0 or more, at most 1": "memory.kept_fraction optimizer.min_learning_rate_ratio",
    "0 or more, below 1": "optimizer.beta1 optimizer.beta2 train.dropout",
    "more than 0, below 1": "data.validation_fraction",
    "1 or more, at most 65535": "cluster.master_port cluster.ssh.port",
}


def test_every_number_has_its_bounds() -> None:
    found = {spec.key: spec.note.bounds() for spec in SPECS.values() if spec.note.bounds()}
    assert found == {key: bounds for bounds, keys in BOUNDS.items() for key in keys.split()}


UNITS = {"_s": "seconds", "_bytes": "bytes", "_tokens": "tokens", "interval_steps": "steps", "seq_len": "tokens"}


def test_every_setting_is_documented_and_its_default_legal() -> None:
    for spec in SPECS.values():
        assert spec.note.doc, f"{spec.key} has no doc"
        for ending, unit in UNITS.items():
            if spec.key.endswith(ending) and not spec.key.endswith("_per_s"):
                assert spec.note.unit == unit, spec.key
        if isinstance(spec.default, (int, float)) and not isinstance(spec.default, bool):
            assert spec.note.admits(spec.default), spec.key
        assert spec.choices is None or spec.default is None or spec.default in spec.choices, spec.key


def test_yaml_text_comes_back_unchanged(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("train.steps", 5.0, 5),
        ("train.steps", "1e3", 1000),
        ("train.seq_len", "128K", 131072),
        ("data.length_buckets", ["4K", "1M"], (4096, 1048576)),
        ("optimizer.learning_rate", "1e-4", 1e-4),  # PyYAML reads 1e-4 as text
        ("optimizer.learning_rate", 1, 1.0),
        ("optimizer.max_grad_norm", None, None),
        ("data.paths", ["a", "b"], ("a", "b")),
        ("attention.layout", "zigzag", "zigzag"),
        ("train.profile", "3:5", "3:5"),
        ("cluster.container.run_options", ["--ipc=host"], ("--ipc=host",)),
        ("cluster.container.run_options", None, None),
    ],
)
def test_values_are_read_as_people_write_them(key: str, value: object, read: object) -> None:
    config: object = config_from_dict(nested(key, value))
    for name in key.split("."):
        config = getattr(config, name)
    assert config == read
    assert type(config) is type(read)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("train.steps", "many", "train.steps: expected a whole number, got the text 'many'"),
        ("train.steps", "1K", "train.steps: expected a whole number, got the text '1K'"),
        ("train.steps", 1.5, "train.steps: expected a whole number, got the number 1.5"),
        ("train.steps", True, "train.steps: expected a whole number, got the truth value true"),
        ("train.steps", None, "train.steps: expected a whole number, got null"),
        ("train.steps", {"a": 3}, "train.steps: expected a whole number, got a table with a"),
        ("train.steps", 2**63, f"train.steps: expected a whole number, got the number {2**63}"),
        ("train.compile", "yes", "train.compile: expected true or false, got the text 'yes'"),
        ("model.name", 7, "model.name: expected text, got the number 7; put it in quotes: \"model.name='7'\""),
        ("train.profile", 185, "train.profile: expected text or null, got the number 185; put it in quotes: "),
        ("data.paths", "a", "data.paths: expected a list, each item text, got the text 'a'; put it in brackets: "),
        ("data.paths", ["a", 3], "data.paths[1]: expected text, got the number 3"),
        ("model", 3, "model: expected a table of settings, got the number 3"),
        ("train.seqlen", 3, "train.seqlen: no such setting; did you mean train.seq_len?"),
        ("trian.steps", 3, "trian: no such setting; did you mean train?"),
        ("seq_len", 3, "seq_len: no such setting; did you mean train.seq_len?"),
        ("loss.wheels", 3, "loss.wheels: no such setting; loss has chunk_tokens, z_loss"),
        ("cluster.slurm.qos", "high", "cluster.slurm.qos: no such setting any more; name it in cluster.slurm.options"),
        ("data.bos", "on", "data.bos=on: no such value any more; data.bos=auto takes the template (post_processor) in"),
        ("wheels", 3, "wheels: no such setting; `burst config --fields` lists every setting"),
        (
            "attention.preset",
            "brust",
            f"attention.preset: 'brust' is not a legal value; legal: {PRESET_NAMES}; did you mean burst?",
        ),
        (
            "attention.layout",
            "x",
            f"attention.layout: 'x' is not a legal value; legal: {', '.join(get_args(LayoutName))}, null",
        ),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(key: str, value: object, text: str) -> None:
    (problem,) = problems_of(nested(key, value))
    assert problem.startswith(text)
    assert read_dataclass(RunConfig, nested(key, value))[0] == RunConfig()  # a mistaken field has its default


@pytest.mark.parametrize(("key", "value"), [("train.guard.window_steps", 64), ("cluster.name", "x")])
def test_files_of_earlier_runs_say_what_is_so_without_the_setting(key: str, value: object) -> None:
    assert config_from_dict(nested(key, value)) == RunConfig()


def test_all_mistakes_are_told_at_once() -> None:
    values = {"modle": {}, "train": {"steps": "x", "seqlen": 3}, "attention": {"preset": "y"}, "data": 4}
    assert [problem.partition(":")[0] for problem in problems_of(values)] == [
        "modle",
        "attention.preset",
        "train.seqlen",
        "train.steps",
        "data",
    ]


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
            prints.add(config_fingerprint(config_from_dict(nested(spec.key, other))))
    changed = [spec for spec in SPECS.values() if spec.choices or isinstance(spec.default, (bool, int, float, str))]
    assert len(prints) == 1 + len(changed)
    assert config_fingerprint(config_from_dict(to_plain(RunConfig()))) in prints


def test_ranks_need_neither_hydra_nor_torch_to_read_a_configuration() -> None:
    code = (
        "import sys, engine.config.rules; from engine.config.settings import *;"
        "print(config_fingerprint(RunConfig()), *sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, timeout=200
    )
    fingerprint, *modules = result.stdout.split()
    assert fingerprint == config_fingerprint(RunConfig())  # the same in every process
    loaded = {name.partition(".")[0] for name in modules}
    assert loaded.isdisjoint({"torch", "numpy", "hydra", "omegaconf", "typer", "rich", "paramiko"})
