"""Rules of settings: each one breaks, all at once, and the legal neighbour passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testkit.sections import changed

from engine.config.errors import ConfigError
from engine.config.rules import check_config, config_problems
from engine.config.settings import RunConfig


def config(**changes: dict[str, Any]) -> RunConfig:
    """The defaults with some settings changed."""
    return changed(RunConfig(), **changes)


RANKS4 = {"ranks_per_node": 4}

NOT_CLIPPED = {"max_grad_norm": None}
SHARDS = {"format": "shards", "paths": ("/",)}
CHATS = {"format": "jsonl", "paths": (__file__,), "messages_field": "messages", "chat_template": "chatml"}

BROKEN = {
    "memory.checkpoint_layers: names the policies of the layers, but memory.activation_checkpoint=auto": {
        "memory": {"activation_checkpoint": "auto", "checkpoint_layers": ("full", "none")}
    },
    "memory.kept_fraction: got 1.5, expected 0 or more, at most 1": {"memory": {"kept_fraction": 1.5}},
    "optimizer.beta1: got nan, expected 0 or more, below 1": {"optimizer": {"beta1": float("nan")}},
    "optimizer.beta2: got 1.0, expected 0 or more, below 1": {"optimizer": {"beta2": 1.0}},
    "train.steps: got 0, expected 1 or more steps": {"train": {"steps": 0}},
    "data.validation_fraction: got 0.0, expected more than 0, below 1": {"data": {"validation_fraction": 0.0}},
    "memory.optimizer_in_backward=true updates layers before the norm of all gradients is known": {
        "memory": {"optimizer_in_backward": True}
    },
    "memory.optimizer_in_backward=true updates a layer after its first backward pass": {
        "memory": {"optimizer_in_backward": True},
        "optimizer": NOT_CLIPPED,
        "train": {"grad_accum_steps": 2},
    },
    "memory.optimizer_in_backward=true has updated the weights before a step can be judged": {
        "memory": {"optimizer_in_backward": True},
        "optimizer": NOT_CLIPPED,
        "train": {"guard": {"spike_deviations": 8.0}},
    },
    "memory.optimizer_in_backward=true saves nothing here": {
        "memory": {"optimizer_in_backward": True},
        "optimizer": NOT_CLIPPED,
        "parallel": {"dp_replicate_size": 2},
    },
    "model.init_from: null, but exp=tiny goes on with a trained model and would start from random weights": {
        "model": {"require_init_from": True}
    },
    "train.guard: rewind goes back to a checkpoint, but none is saved": {
        "train": {"guard": {"on_nonfinite": "rewind"}, "checkpoint": {"at_end": True}}
    },
    "attention.window_tokens: null, but a windowed mask": {"attention": {"mask_layers": ("causal", "sink_window")}},
    "attention.blocks_file: null, but attention.mask=blocks": {"attention": {"mask": "blocks"}},
    "attention.vertical_blocks: got (1, -1), but blocks count from 0": {
        "attention": {"mask": "vertical_slash", "vertical_blocks": (1, -1)}
    },
    "attention.slash_blocks: got (0, -1); distances begin with 0": {
        "attention": {"mask": "vertical_slash", "slash_blocks": (0, -1)}
    },
    "attention.slash_blocks: got (); distances begin with 0": {
        "attention": {"mask": "vertical_slash", "slash_blocks": ()}
    },
    "model.num_kv_heads: got 3, expected a divisor of model.num_heads=4: 1, 2, 4": {"model": {"num_kv_heads": 3}},
    "model.num_kv_heads: got 8": {"model": {"num_kv_heads": 8}},
    "model.head_dim: got 63, expected an even number": {"model": {"head_dim": 63}},
    "model.rope_theta: got inf, expected more than 0": {"model": {"rope_theta": float("inf")}},
    "model.rope_scaling.original_seq_len: kind=yarn needs the length": {"model": {"rope_scaling": {"kind": "yarn"}}},
    "model.rope_scaling.factor: got 2.0, but kind=none": {"model": {"rope_scaling": {"factor": 2.0}}},
    "model.vocab_size: got 255, but data.tokenizer=bytes gives 256": {"model": {"vocab_size": 255}},
    "model.vocab_size: got 256, but data.tokenizer=bpe gives 4096": {"data": {"tokenizer": "bpe"}},
    "optimizer.warmup_steps: got 101, expected at most train.steps=100": {"optimizer": {"warmup_steps": 101}},
    "optimizer.decay_steps: only optimizer.schedule=wsd": {"optimizer": {"decay_steps": 5}},
    "optimizer.decay_steps: warm-up 60 + decay 50 steps exceed train.steps=100": {
        "optimizer": {"schedule": "wsd", "warmup_steps": 60, "decay_steps": 50}
    },
    "train.profile: got '0:2', expected START:STOP with 1 <= START < STOP <= 101": {"train": {"profile": "0:2"}},
    "train.profile: got '5:5'": {"train": {"profile": "5:5"}},
    "train.profile: got '5:102'": {"train": {"profile": "5:102"}},
    "train.profile: got '5'": {"train": {"profile": "5"}},
    "data.paths: data.format=jsonl reads files, but none was given": {"data": {"format": "jsonl"}},
    "data.paths: data.format=stdlib reads no files": {"data": {"paths": ("/",)}},
    "data.paths: no such file or folder: '/no/such/*.txt'": {"data": {"format": "text", "paths": ("/no/such/*.txt",)}},
    "data.tokenizer: got '/no/tokenizer.json', expected bytes, bpe or": {"data": {"tokenizer": "/no/tokenizer.json"}},
    "data.prepared_dir: ": {"data": {"prepared_dir": __file__}},
    "data.prepared_dir: got '~no user/x'": {"data": {"prepared_dir": "~no user/x"}},
    "data.mix_paths: got '~no user/x'": {"data": {"mix_paths": ("~no user/x",), "mix_weights": (1.0, 1.0)}},
    "data.paths has 2 entries; data.format=shards takes one": {"data": {"format": "shards", "paths": ("/", "/tmp")}},
    "data.bos=off: data.format=shards takes tokens as they are": {"data": {**SHARDS, "bos": "off"}},
    "data.prompt_field names a key of JSON lines, but": {"data": {"prompt_field": "ask"}},
    "data.messages_field names a key of JSON lines, but data.format=text": {"data": {**CHATS, "format": "text"}},
    "data.messages_field=messages and data.prompt_field=ask": {"data": {**CHATS, "prompt_field": "ask"}},
    "data.chat_template: data.tokenizer=bytes has no chat template beside it": {
        "data": {**CHATS, "chat_template": None}
    },
    "data.chat_template: got 'no.jinja', expected null, chatml or the path": {
        "data": {**CHATS, "chat_template": "no.jinja"}
    },
    "data.chat_template=chatml renders conversations, but data.messages_field is null": {
        "data": {**CHATS, "messages_field": None}
    },
    "data.mix_weights: got [], expected one positive number for data.paths and one for each of the 1": {
        "data": {"mix_paths": ("/tmp",)}
    },
    "data.mix_weights: got [1.0, 0.0]": {"data": {"mix_paths": ("/tmp",), "mix_weights": (1.0, 0.0)}},
    "data.mix_paths: no such folder: '/no/such'": {"data": {"mix_paths": ("/no/such",), "mix_weights": (1.0, 1.0)}},
    "data.length_buckets: got [4, 4], expected lengths": {
        "data": {"length_buckets": (4, 4), "length_weights": (0.2, 0.2, 0.6)}
    },
    "data.length_buckets: got [1], expected lengths": {"data": {"length_buckets": (1,), "length_weights": (0.5, 0.5)}},
    "data.length_weights: got 1 numbers, expected 2: one more than the 1": {
        "data": {"length_buckets": (4,), "length_weights": (1.0,)}
    },
    "data.length_weights: got 1 numbers, expected 0": {"data": {"length_weights": (1.0,)}},
    "data.length_weights: got [0.5, 0.6], expected shares of 0 or more that add up to 1": {
        "data": {"length_buckets": (4,), "length_weights": (0.5, 0.6)}
    },
    "data.length_weights: got [-0.5, 1.5]": {"data": {"length_buckets": (4,), "length_weights": (-0.5, 1.5)}},
    "data.length_weights: got [nan, 1.0]": {"data": {"length_buckets": (4,), "length_weights": (float("nan"), 1.0)}},
    "attention.documents=true hides what data.echo_tokens repeats": {
        "data": {"echo_tokens": 8},
        "attention": {"documents": True},
    },
    "data.length_buckets needs whole documents, and data.echo_tokens cuts them": {
        "data": {"echo_tokens": 8, "length_buckets": (4,), "length_weights": (0.5, 0.5)}
    },
    "cluster.container.runtime=docker needs an image: ": {"cluster": {"container": {"runtime": "docker"}}},
    "cluster.shared_folder: got 'rel', expected an absolute path": {"cluster": {"shared_folder": "rel"}},
    "cluster.ssh.jump: got '-x', expected a name": {"cluster": {"ssh": {"jump": "-x"}}},
    "cluster.launcher=local starts ranks on this machine, but cluster.nodes=n[1-4]": {
        "cluster": {"launcher": "local", "nodes": "n[1-4]"}
    },
    "cluster.launcher=local starts ranks on this machine, but cluster.num_nodes=2": {
        "cluster": {"launcher": "local", "num_nodes": 2}
    },
    "cluster.python: got 'python3', expected an absolute path or one in the home folder": {
        "cluster": {"python": "python3"}
    },
    "cluster.node_folder: got 'burst', expected an absolute path or one in the home": {
        "cluster": {"node_folder": "burst"}
    },
    "cluster.node_folder: got '~/../x', expected a path without `..`": {"cluster": {"node_folder": "~/../x"}},
    "cluster.node_folder: got '/a:b', expected a path without": {"cluster": {"node_folder": "/a:b"}},
    "cluster.environment[0]: 'A' is not NAME=VALUE in one line": {"cluster": {"environment": ("A",)}},
    "cluster.environment[0]: '1A' is not NAME=VALUE in one line": {"cluster": {"environment": ("1A=b",)}},
    "cluster.environment[0]: 'A' is not NAME=VALUE in one line, with a name": {"cluster": {"environment": ("A=b\nc",)}},
    "cluster.environment[1]: A is set twice": {"cluster": {"environment": ("A=1", "A=2")}},
    "cluster.environment[0]: BURST_NODE is set by burst for every rank": {
        "cluster": {"environment": ("BURST_NODE=x",)}
    },
    "cluster.environment[0]: MASTER_PORT is set by torchrun": {"cluster": {"environment": ("MASTER_PORT=1",)}},
    "cluster.slurm.time_limit: got 'soon', expected [DAYS-]HH:MM:SS": {"cluster": {"slurm": {"time_limit": "soon"}}},
    "cluster.slurm.time_limit: got '43200', expected [DAYS-]HH:MM:SS": {"cluster": {"slurm": {"time_limit": "43200"}}},
    "cluster.slurm.options[0]: got '-p main', expected --NAME=VALUE": {"cluster": {"slurm": {"options": ("-p main",)}}},
    "cluster.kubernetes.runtime: got 'a b', expected a name": {"cluster": {"kubernetes": {"runtime": "a b"}}},
    "cluster.container.image: got '-v /:/x', expected NAME:TAG": {"cluster": {"container": {"image": "-v /:/x"}}},
    'cluster.container.command: got "\'docker", expected a command line': {
        "cluster": {"container": {"command": "'docker"}}
    },
    "cluster.container.command: got '  ', expected a command line": {"cluster": {"container": {"command": "  "}}},
    "cluster.container.run_options: got 'all' first, expected options": {
        "cluster": {"container": {"run_options": ("all",)}}
    },
    "cluster.container.mounts[0]: got 'data', expected an absolute path": {
        "cluster": {"container": {"mounts": ("data",)}}
    },
    "cluster.container.mounts[0]: got '/a:/b', expected an absolute path": {
        "cluster": {"container": {"mounts": ("/a:/b",)}}
    },
    "cluster.ssh.user: got '-x', expected a name without dash in front": {"cluster": {"ssh": {"user": "-x"}}},
    "cluster.topology_nodes: 3 nodes cannot share 4 ranks": {
        "cluster": {**RANKS4, "topology_nodes": 3},
        "attention": {"preset": "burst"},
    },
    "parallel: dp_replicate_size 1 x dp_shard_size 3 = 3 does not divide the 4 ranks": {
        "parallel": {"dp_shard_size": 3},
        "cluster": RANKS4,
    },
    "parallel: dp_replicate_size 2 x dp_shard_size 1 x cp_size 4 = 8, but there are 4 ranks": {
        "parallel": {"cp_size": 4, "dp_replicate_size": 2},
        "cluster": RANKS4,
        "attention": {"preset": "burst"},
    },
    "parallel.tp_size: got 4, which does not divide the 2 ranks of a node": {
        "parallel": {"tp_size": 4},
        "cluster": {**RANKS4, "topology_nodes": 2},
    },
    "parallel.tp_size: got 3, which does not divide model.vocab_size=256": {
        "model": {"num_heads": 6, "num_kv_heads": 3, "ffn_hidden_size": 6},
        "parallel": {"tp_size": 3},
    },
    "attention=single holds the whole sequence on one rank, but 4 ranks share it": {"cluster": RANKS4},
    "attention=single holds the whole sequence on one rank, but 2 ranks share it": {"parallel": {"cp_size": 2}},
    "attention: head_parallel_size 1 x ring_inner_size 3 x ring_outer_size 1 = 3 ranks, but 4 ranks share": {
        "attention": {"preset": "burst", "ring_inner_size": 3},
        "cluster": RANKS4,
    },
    "attention: head_parallel_size 1 x ring_inner_size 3 x ring_outer_size 2 = 6 ranks, but 4 ranks": {
        "attention": {"preset": "ring", "ring_inner_size": 3, "ring_outer_size": 2},
        "parallel": {"cp_size": 4},
    },
    "train.seq_len: got 3 tokens for 4 ranks": {
        "train": {"seq_len": 3},
        "attention": {"preset": "ring"},
        "cluster": RANKS4,
    },
}

LEGAL = [
    {},
    {"memory": {"activation_checkpoint": "auto"}},
    {"memory": {"checkpoint_layers": ("attn_out_every", "full"), "kept_fraction": 0.25}},
    {"memory": {"optimizer_in_backward": True}, "optimizer": NOT_CLIPPED},
    {"model": {"num_kv_heads": 1}},
    {"model": {"vocab_size": 4096}, "data": {"tokenizer": "bpe"}},
    {"model": {"vocab_size": 2}, "data": SHARDS},  # the shards name their own vocabulary
    {"model": {"require_init_from": True}, "train": {"checkpoint": {"resume_from": "/run"}}},
    {"memory": {"activation_store": "host", "host_layers": 1}},
    {"train": {"guard": {"on_nonfinite": "rewind"}, "checkpoint": {"every_minutes": 5.0}}},
    {"optimizer": {"warmup_steps": 100}},
    {"optimizer": {"schedule": "wsd", "warmup_steps": 50, "decay_steps": 50}},
    {"optimizer": {"max_grad_norm": None, "beta1": 0.0, "weight_decay": 0.0}},
    {"train": {"profile": "100:101"}},
    {"data": {"format": "text", "paths": (__file__, "/tm*")}},
    {"data": {"tokenizer": __file__}},
    {"data": CHATS},
    {
        "cluster": {
            "nodes": "n[1-4]",
            "python": "~/venv/bin/python",
            "node_folder": "/scratch/me",
            "environment": ("A=b=c", "B="),
        }
    },
    {"cluster": {"launcher": "slurm", "slurm": {"time_limit": "2-00:00:00", "options": ("--reservation=x",)}}},
    {
        "cluster": {
            "container": {
                "image": "registry.local:5000/a/b@sha256:00",
                "command": "sudo -n docker",
                "mounts": ("/a:rw",),
                "run_options": ("--gpus", "all"),
            }
        }
    },
    {"cluster": {"container": {"run_options": ()}}},
    {"parallel": {"dp_shard_size": 4}, "cluster": RANKS4},
    {"parallel": {"tp_size": 2, "dp_shard_size": 2}, "cluster": RANKS4},
    {"parallel": {"dp_shard_size": 2, "dp_replicate_size": 2, "cp_size": 1}, "cluster": RANKS4},
    {"attention": {"preset": "burst"}, "cluster": {**RANKS4, "topology_nodes": 2}},
    {"attention": {"preset": "burst", "ring_inner_size": 2, "ring_outer_size": 2}, "cluster": RANKS4},
    {"attention": {"preset": "ring"}, "parallel": {"cp_size": 3}},  # the number of ranks is found at launch
]


@pytest.mark.parametrize(("text", "changes"), BROKEN.items(), ids=BROKEN)
def test_a_broken_rule_is_the_only_one_told(text: str, changes: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config(**changes))
    (problem,) = caught.value.problems
    assert problem.startswith(text)


def test_a_tokenizer_trained_on_the_corpus_means_nothing_to_older_weights() -> None:
    model = {"init_from": "/m", "vocab_size": 4096}
    text = "data.tokenizer=bpe is trained on this corpus, so the weights of model.init_from=/m know none of its tokens"
    assert any(one.text.startswith(text) for one in config_problems(config(model=model, data={"tokenizer": "bpe"})))
    made_elsewhere = {"tokenizer": "bpe", "format": "shards", "paths": ("/",)}
    for data in ({"tokenizer": __file__}, {"tokenizer": "bytes"}, made_elsewhere):
        assert not any(one.text.startswith(text) for one in config_problems(config(model=model, data=data)))


@pytest.mark.parametrize("changes", LEGAL, ids=str)
def test_a_legal_configuration_passes(changes: dict[str, dict[str, Any]]) -> None:
    check_config(config(**changes))


def test_a_secret_that_came_into_a_name_is_not_told() -> None:
    (problem,) = config_problems(config(cluster={"environment": ("TOKEN=canary-7f3a\n",)}))
    assert "canary" not in problem.text


@pytest.mark.parametrize(
    ("cluster", "is_looked_for"),
    [({}, True), ({"launcher": "slurm", "num_nodes": 2}, True), ({"nodes": "n1"}, False), ({"launcher": "ssh"}, False)],
)
def test_files_of_this_machine_are_looked_for_only_if_ranks_run_on_it(
    cluster: dict[str, Any], is_looked_for: bool
) -> None:
    found = config(cluster=cluster, data={"format": "text", "paths": ("/none/corpus.txt",)})
    assert any("no such file" in problem.text for problem in config_problems(found)) == is_looked_for
    assert found.cluster.runs_elsewhere != is_looked_for


def test_all_broken_rules_are_told_at_once() -> None:
    broken = config(
        model={"head_dim": 63},
        optimizer={"beta1": 2.0, "warmup_steps": 500},
        train={"profile": "x"},
        data={"format": "text"},
        cluster=RANKS4,
    )
    keys = [problem.text.partition(":")[0].partition(" ")[0] for problem in config_problems(broken)]
    assert keys == [
        "optimizer.beta1",
        "model.head_dim",
        "optimizer.warmup_steps",
        "train.profile",
        "data.paths",
        "attention=single",
    ]


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "x" * 101])
def test_exp_names_a_folder(name: str) -> None:
    (problem,) = config_problems(replace(RunConfig(), exp=name))
    assert problem.keys == ("exp",)
    assert "use letters, digits" in problem.text


def test_paths_start_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    relative = config(data={"format": "text", "paths": ("corpus.txt", "corp*.txt")})
    assert len(config_problems(relative)) == 2
    monkeypatch.chdir(tmp_path)
    assert config_problems(relative) == []


def test_nonsense_numbers_never_crash_the_rules() -> None:
    for value in (0, -1, -4):
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            assert config_problems(config(model={name: value}, cluster=RANKS4, attention={"preset": "burst"}))
        for name in ("cp_size", "dp_shard_size", "dp_replicate_size"):
            assert config_problems(config(parallel={name: value}, cluster=RANKS4))
        for name in ("ranks_per_node", "topology_nodes"):
            assert config_problems(config(cluster={name: value}))
        for name in ("ring_inner_size", "ring_outer_size"):
            assert config_problems(config(attention={name: value, "preset": "ring"}, cluster=RANKS4))
