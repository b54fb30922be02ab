"""The configuration as dataclasses: reading, writing, mistakes, fingerprint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from testkit import ROOT
from testkit.typed_settings import cases, config, values_of

from engine.config.errors import ConfigError
from engine.config.schema import read_dataclass, to_plain, walk_fields
from engine.config.settings import Dtype, LayoutName, PresetName, RunConfig, config_from_dict, dump_config, load_config
from engine.runs.record import config_fingerprint

SPECS = {spec.key: spec for spec in walk_fields(RunConfig)}


def problems_of(values: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values)
    return caught.value.problems


# [what numbers may be] settings, each with its default unless that is null.
SETTINGS = """
    [] exp=tiny model.name=tiny model.rope_scaling.kind=none model.qkv_bias=False model.qk_norm=False
    model.implementation=burst model.gated_ffn=True
    model.lora.target_modules=('all-linear',) model.lora.target_parameters=() model.lora.dora=False
    model.tie_embeddings=False model.require_init_from=False attention.preset=single attention.mask=causal
    attention.mask_layers=() attention.documents=False attention.check_plans=False attention.kernel=auto
    memory.activation_checkpoint=full
    memory.checkpoint_layers=() memory.optimizer_store=device memory.optimizer_in_backward=False
    memory.moments_dtype=float32 optimizer.schedule=cosine train.compute_dtype=bfloat16 train.deterministic=False
    train.evaluate_only=False train.compile=False train.tensorboard=False train.checkpoint.at_end=False
    train.checkpoint.in_background=False train.guard.on_nonfinite=stop train.guard.on_spike=skip data.format=stdlib
    data.paths=() data.text_suffixes=() data.on_bad_row=refuse data.text_field=text data.tokenizer=bytes data.bos=auto
    data.mix_paths=() data.mix_weights=()
    data.length_weights=() cluster.launcher=auto cluster.backend=auto cluster.ranks_share_device=False
    cluster.environment=() cluster.container.runtime=bare cluster.container.command=docker
    cluster.container.mounts=() cluster.slurm.options=() cluster.kubernetes.kind=JobSet
    cluster.kubernetes.gpu_resource=nvidia.com/gpu cluster.kubernetes.node_selector=()
    cluster.kubernetes.runtime=torch-distributed cluster.machine.name=auto cluster.machine.rates=() [1 or more
    tokens] model.rope_scaling.original_seq_len attention.chunk_tokens attention.window_tokens
    attention.sink_tokens=4 attention.block_tokens memory.tile_tokens loss.chunk_tokens=2048 train.seq_len=4096
    data.echo_tokens [more than 0] model.rope_theta=10000.0 model.norm_eps=1e-05 model.init_std=0.02
    optimizer.learning_rate=0.0003 optimizer.epsilon=1e-08 optimizer.max_grad_norm=1.0 train.guard.spike_deviations
    [1 or more] model.hidden_size=256 model.ffn_hidden_size=688 model.rope_scaling.factor=1.0
    train.eval_position_buckets=1 cluster.num_nodes cluster.kubernetes.cpus_per_pod [1 or more ranks]
    attention.head_parallel_size attention.ring_inner_size parallel.cp_size parallel.dp_shard_size=1
    parallel.tp_size=1 cluster.ranks_per_node [0 or more] seed=0 loss.z_loss=0.0 optimizer.weight_decay=0.1
    cluster.expected.hcas [1 or more steps] optimizer.decay_steps train.steps=100 train.eval_interval_steps
    train.checkpoint.every_steps [1 or more layers] model.num_layers=4 memory.every_layers=4 memory.host_layers [1
    or more bytes] memory.device_bytes memory.host_bytes data.max_bytes [0 or more, below 1] optimizer.beta1=0.9
    optimizer.beta2=0.95 train.dropout=0.0 [0 or more devices] cluster.slurm.gpus_per_node
    cluster.kubernetes.gpus_per_pod=0 cluster.expected.gpus [1 or more heads] model.num_heads=4 model.num_kv_heads=4
    [1 or more blocks] attention.block_stride=8 attention.local_blocks=2 [blocks] attention.vertical_blocks=(0,)
    attention.slash_blocks=(0,1) [0 or more, at most 1] memory.saved_fraction=0.5
    optimizer.min_learning_rate_ratio=0.1 [1 or more sequences] train.micro_batch_size=1 train.eval_samples=8 [1 or
    more, at most 65535] cluster.master_port cluster.ssh.port [more than 0 seconds] cluster.hang_timeout_s
    cluster.ssh.connect_timeout_s=10.0 [2 or more tokens] model.vocab_size=256 [2 or more] model.head_dim=64 [1 or
    more rings] attention.ring_outer_size [0 or more chunks] attention.prefetch_chunks [1 or more copies]
    parallel.dp_replicate_size=1 [1 or more multiprocessors] parallel.comm_sms [0 or more steps]
    optimizer.warmup_steps=0 [1 or more micro-steps] train.grad_accum_steps=1 [0 or more depths]
    train.eval_needle_depths=0 [1 or more texts] train.eval_needle_samples=4 [steps] train.profile [more than 0
    FLOP/s] train.peak_flops_per_device [more than 0 minutes] train.checkpoint.every_minutes [2 or more checkpoints]
    train.checkpoint.keep_last=2 [12 or more seconds] train.checkpoint.stop_grace_s=60.0 [257 or more tokens]
    data.bpe_vocab_size=4096 [more than 0, below 1] data.validation_fraction=0.01 [tokens] data.length_buckets=() [1
    or more threads] cluster.threads_per_rank [1 or more nodes] cluster.topology_nodes [5 or more seconds]
    cluster.lease_s=60.0 [0 or more attempts] cluster.max_restarts=0 [more than 0 Gbit/s]
    cluster.expected.hca_rate_gbps [1 or more] model.lora.rank model.v_head_dim model.kv_lora_rank model.q_lora_rank
    model.rope_head_dim [0 or more layers] model.num_moe_layers=0 [0 or more experts] model.num_experts=0
    model.experts_per_token=0 [0 or more] model.expert_ffn_hidden_size=0 model.shared_expert_ffn_hidden_size=0
    [more than 0] model.lora.alpha=16.0
"""


def test_settings_are_documented() -> None:
    assert not [key for key, spec in SPECS.items() if not spec.note.doc]


def test_defaults_of_settings_are_legal() -> None:
    for key, spec in SPECS.items():
        if isinstance(spec.default, (int, float)) and not isinstance(spec.default, bool):
            assert spec.note.admits(spec.default), key
        assert spec.choices is None or spec.default is None or spec.default in spec.choices, key


def test_settings_have_their_bounds_units_defaults() -> None:
    rows = re.findall(r"\[(.*?)\]([^[]*)", " ".join(SETTINGS.split()))
    wanted = {setting.partition("=")[::2]: words for words, settings in rows for setting in settings.split()}
    for spec in SPECS.values():
        default = "" if spec.default is None else str(spec.default).replace(" ", "")
        found = " ".join(filter(None, (spec.note.bounds(), spec.note.unit)))
        assert wanted.get((spec.key, default), "" if default == "" else None) == found, spec.key


@pytest.mark.parametrize(
    ("key", "legal"),
    [("train.compile", ("true", "false")), ("train.steps", ()), ("train.compute_dtype", get_args(Dtype))],
)
def test_legal_values_are_those_of_the_type(key: str, legal: tuple[str, ...]) -> None:
    assert SPECS[key].legal_values() == legal


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
