"""Rules of settings: each one breaks, all at once, and the legal neighbour passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from testkit.typed_settings import cases, config

from engine.config.errors import ConfigError
from engine.resolve.legality import check_run, problems

RANKS4 = "cluster.ranks_per_node=4"
TP2 = "parallel.tp_size=2 & cluster.ranks_per_node=2"
IN_BACKWARD = "memory.optimizer_in_backward=true & optimizer.max_grad_norm=null"
HF = "model.implementation=hf & model.hf_config={num_hidden_layers: 4, model_type: mine}"
CHATS = f"data.format=jsonl & data.paths=[{__file__}] & data.messages_field=messages & data.chat_template=chatml"


# Settings | how the only problem that they make begins.
BROKEN = cases(rf"""
memory.activation_checkpoint=auto & memory.checkpoint_layers=[full, none] |
    memory.checkpoint_layers: names the policies of the layers, but memory.activation_checkpoint=auto
memory.saved_fraction=1.5 | memory.saved_fraction: got 1.5, expected 0 or more, at most 1
optimizer.beta1=.nan | optimizer.beta1: got nan, expected 0 or more, below 1
optimizer.beta2=1.0 | optimizer.beta2: got 1.0, expected 0 or more, below 1
train.steps=0 | train.steps: got 0, expected 1 or more steps
data.validation_fraction=0.0 | data.validation_fraction: got 0.0, expected more than 0, below 1
memory.optimizer_in_backward=true |
    memory.optimizer_in_backward=true updates layers before the norm of all gradients is known
{IN_BACKWARD} & train.grad_accum_steps=2 |
    memory.optimizer_in_backward=true updates a layer after its first backward pass
{IN_BACKWARD} & train.guard.spike_deviations=8.0 |
    memory.optimizer_in_backward=true has updated the weights before a step can be judged
{IN_BACKWARD} & parallel.dp_replicate_size=2 | memory.optimizer_in_backward=true saves nothing here
model.require_init_from=true |
    model.init_from: null, but exp=tiny continues a trained model and would start from random weights
train.evaluate_only=true | train.evaluate_only=true evaluates weights that are there, but none are named
train.guard.on_nonfinite=rewind & train.checkpoint.at_end=true |
    train.guard: rewind goes back to a checkpoint, but none is saved
attention.mask_layers=[causal, sink_window] | attention.window_tokens: null, but a windowed mask
attention.mask=window | attention.window_tokens: null, but a windowed mask
attention.mask=no_attention | attention.mask, attention.mask_layers: no_attention is for the linear layers
attention.mask_layers=[no_attention, causal] |
    attention.mask, attention.mask_layers: no_attention is for the linear layers
attention.mask=blocks | attention.blocks_file: null, but attention.mask=blocks
attention.mask=blocks & attention.blocks_file=/no | attention.blocks_file: no such file: '/no'
attention.documents=true & train.micro_batch_size=2 | attention.documents=true needs train.micro_batch_size=1, got 2
attention.layout=per_document | attention.layout=per_document divides every document over the ranks
attention.layout=per_document & attention.documents=true & {TP2} | attention.layout=per_document gives ranks blocks of
attention.layout=balanced & {TP2} | attention.layout=balanced gives ranks blocks of unequal length
memory.host_layers=1 | memory.host_layers=1 is the number of layers with saved tensors
attention.mask=vertical_slash & attention.vertical_blocks=[1, -1] |
    attention.vertical_blocks: got (1, -1), but blocks count from 0
attention.mask=vertical_slash & attention.slash_blocks=[0, -1] |
    attention.slash_blocks: got (0, -1), expected distances from 0 on
attention.mask=vertical_slash & attention.slash_blocks=[] | attention.slash_blocks: got (), expected distances from 0 on
model.num_kv_heads=3 | model.num_kv_heads: got 3, expected a divisor of model.num_heads=4: 1, 2, 4
model.num_kv_heads=8 | model.num_kv_heads: got 8
model.head_dim=63 | model.head_dim: got 63, expected an even number
model.implementation=hf | model.hf_config: null, but model.implementation=hf builds the model from it
model.num_experts=4 | model.implementation=burst is this engine's Llama-style decoder, which has no model.num_experts
model.gated_ffn=false | model.implementation=burst is this engine's Llama-style decoder, which has no model.gated_ffn
{HF} & train.dropout=0.1 | train.dropout=0.1: model.implementation=hf has the dropout of its config.json alone
{HF} & train.compile=true | train.compile=true: model.implementation=hf is not compiled
{HF} & {TP2} | parallel.tp_size=2: model.implementation=hf has no tensor parallelism
{HF} & memory.activation_checkpoint=attn_out_every | memory.activation_checkpoint: got attn_out_every, but
{HF} & model.rope_scaling.kind=linear & model.rope_scaling.factor=2.0 |
    model.rope_scaling.kind=linear: model.implementation=hf takes RoPE from model.hf_config
{HF} & memory.tile_tokens=64 & {RANKS4} & parallel.cp_size=1 & parallel.dp_shard_size=4 |
    memory.tile_tokens, attention.chunk_tokens: layers run 64 rows at a time, but those of
{HF} & model.num_layers=5 | model.num_layers is 5, in model.hf_config 4
model.rope_theta=.inf | model.rope_theta: got inf, expected more than 0
model.rope_scaling.kind=yarn | model.rope_scaling.original_seq_len: kind=yarn needs the length
model.rope_scaling.kind=llama3 | model.rope_scaling.original_seq_len: kind=llama3 needs the length
model.rope_scaling.factor=2.0 | model.rope_scaling.factor: got 2.0, but model.rope_scaling.kind=none
model.vocab_size=255 | model.vocab_size: got 255, but data.tokenizer=bytes gives 256
data.tokenizer=bpe | model.vocab_size: got 256, but data.tokenizer=bpe gives 4096 different tokens;
    set model.vocab_size=4096 or more or a smaller data.bpe_vocab_size
optimizer.warmup_steps=101 | optimizer.warmup_steps: got 101, expected at most train.steps=100
optimizer.decay_steps=5 | optimizer.decay_steps: only optimizer.schedule=wsd
optimizer.schedule=wsd & optimizer.warmup_steps=60 & optimizer.decay_steps=50 |
    optimizer.decay_steps: warm-up 60 + decay 50 steps exceed train.steps=100
train.profile=0:2 | train.profile: got '0:2', expected START:STOP with 1 <= START < STOP <= 101
train.profile="5:5" | train.profile: got '5:5'
train.profile=5:102 | train.profile: got '5:102'
train.profile="5" | train.profile: got '5'
data.format=jsonl | data.paths: data.format=jsonl reads files, but none was given
data.paths=[/] | data.paths: data.format=stdlib reads no files
data.format=text & data.paths=[""] | data.paths: no such file or folder: ''
data.format=text & data.paths=[/no/such/*.txt] | data.paths: no such file or folder: '/no/such/*.txt'
data.tokenizer=/no/tokenizer.json | data.tokenizer: got '/no/tokenizer.json', expected bytes, bpe or
data.prepared_dir={__file__} | data.prepared_dir: '{__file__}' is a file; give a folder
data.prepared_dir=~no user/x | data.prepared_dir: got '~no user/x'
data.mix_paths=[~no user/x] & data.mix_weights=[1.0, 1.0] | data.mix_paths: got '~no user/x'
data.format=shards & data.paths=[/, /tmp] | data.paths has 2 entries; data.format=shards takes one
data.format=shards & data.paths=[/] & data.bos="off" | data.bos=off: data.format=shards takes tokens as they are
data.prompt_field=ask | data.prompt_field names a key of JSON lines, but
{CHATS} & data.format=text | data.messages_field names a key of JSON lines, but data.format=text
{CHATS} & data.prompt_field=ask | data.messages_field=messages and data.prompt_field=ask
{CHATS} & data.chat_template=null | data.chat_template: data.tokenizer=bytes has no chat template beside it
{CHATS} & data.chat_template=no.jinja | data.chat_template: got 'no.jinja', expected null, chatml or the path
{CHATS} & data.messages_field=null | data.chat_template=chatml renders conversations, but data.messages_field is null
data.mix_paths=[/tmp] | data.mix_weights: got [], expected one positive number for data.paths and one for each of the 1
data.mix_paths=[/tmp] & data.mix_weights=[1.0, 0.0] | data.mix_weights: got [1.0, 0.0]
data.mix_paths=[/no/such] & data.mix_weights=[1.0, 1.0] | data.mix_paths: no such folder: '/no/such'
data.length_buckets=[4, 4] & data.length_weights=[0.2, 0.2, 0.6] | data.length_buckets: got [4, 4], expected lengths
data.length_buckets=[1] & data.length_weights=[0.5, 0.5] | data.length_buckets: got [1], expected lengths
data.length_buckets=[4] & data.length_weights=[1.0] |
    data.length_weights: got 1 numbers, expected 2: one more than the 1
data.length_weights=[1.0] | data.length_weights: got 1 numbers, expected 0
data.length_buckets=[4] & data.length_weights=[0.5, 0.6] |
    data.length_weights: got [0.5, 0.6], expected shares of 0 or more that add up to 1
data.length_buckets=[4] & data.length_weights=[-0.5, 1.5] | data.length_weights: got [-0.5, 1.5]
data.length_buckets=[4] & data.length_weights=[.nan, 1.0] | data.length_weights: got [nan, 1.0]
data.echo_tokens=8 & attention.documents=true | attention.documents=true masks the tokens that data.echo_tokens repeats
data.echo_tokens=8 & data.length_buckets=[4] & data.length_weights=[0.5, 0.5] |
    data.length_buckets needs whole documents, and data.echo_tokens cuts them
exp="" | exp: got '', expected a name for a run folder; use letters, digits
exp=a/b | exp: got 'a/b', expected a name for
exp=../a | exp: got '../a', expected a name for
exp=.hidden | exp: got '.hidden', expected a name for
exp=a b | exp: got 'a b', expected a name for
exp={"x" * 101} | exp: got 'xxx
cluster.container.runtime=docker | cluster.container.runtime=docker needs an image: set cluster.container.image
cluster.shared_folder=rel | cluster.shared_folder: got 'rel', expected an absolute path
cluster.ssh.jump=-x | cluster.ssh.jump: got '-x', expected a name
cluster.launcher=local & cluster.nodes=n[1-4] |
    cluster.launcher=local starts ranks on this machine, but cluster.nodes=n[1-4]
cluster.launcher=local & cluster.num_nodes=2 |
    cluster.launcher=local starts ranks on this machine, but cluster.num_nodes=2
cluster.python=python3 | cluster.python: got 'python3', expected an absolute path or one in the home folder
cluster.node_folder=burst | cluster.node_folder: got 'burst', expected an absolute path or one in the home
cluster.node_folder=~/../x | cluster.node_folder: got '~/../x', expected an absolute path or one in the home folder
cluster.node_folder=/a:b |
    cluster.node_folder: got '/a:b', expected an absolute path or one in the home folder (~/...), without `..`, `:`
cluster.shared_folder=~/x | cluster.shared_folder: got '~/x', expected an absolute path, without
cluster.python=/a/.. | cluster.python: got '/a/..', expected an absolute path or one in the home folder
cluster.python="/a\nb" | cluster.python: got '/a\nb', expected an absolute path
cluster.environment=[A] | cluster.environment[0]: 'A' is not NAME=VALUE in one line
cluster.environment=[1A=b] | cluster.environment[0]: '1A' is not NAME=VALUE in one line
cluster.environment=["A=b\nc"] | cluster.environment[0]: 'A' is not NAME=VALUE in one line, with a name
cluster.environment=[A=1, A=2] | cluster.environment[1]: A is set twice
cluster.machine.name=h1000 | cluster.machine.name: got 'h1000', expected auto
cluster.machine.rates=[wheels=4] | cluster.machine.rates: machine: no such field: wheels
cluster.launcher=kubernetes & cluster.container.image=a:b | cluster.launcher=kubernetes needs cluster.kubernetes.claim
cluster.launcher=kubernetes & cluster.kubernetes.claim=a | cluster.launcher=kubernetes needs cluster.container.image
cluster.slurm.time_limit=soon | cluster.slurm.time_limit: got 'soon', expected [DAYS-]HH:MM:SS
cluster.slurm.time_limit="43200" | cluster.slurm.time_limit: got '43200', expected [DAYS-]HH:MM:SS
cluster.slurm.options=[-p main] | cluster.slurm.options[0]: got '-p main', expected --NAME=VALUE
cluster.slurm.options=["--a\nb"] | cluster.slurm.options[0]: got '--a\nb', expected --NAME=VALUE
cluster.kubernetes.runtime=a b | cluster.kubernetes.runtime: got 'a b', expected a name
cluster.kubernetes.claim=A | cluster.kubernetes.claim: got 'A', expected a name of lower-case letters
cluster.kubernetes.namespace=-o | cluster.kubernetes.namespace: got '-o', expected a name of lower-case letters
cluster.kubernetes.context=-x | cluster.kubernetes.context: got '-x', expected a name without dash
cluster.kubernetes.gpu_resource=a/b/c | cluster.kubernetes.gpu_resource: got 'a/b/c', expected DOMAIN/NAME
cluster.kubernetes.memory_per_pod=200GB | cluster.kubernetes.memory_per_pod: got '200GB', expected a quantity
cluster.kubernetes.node_selector=[a=b, a] | cluster.kubernetes.node_selector[1]: got 'a', expected KEY=VALUE
cluster.kubernetes.node_selector=[a=-b] | cluster.kubernetes.node_selector[0]: got 'a=-b', expected KEY=VALUE
cluster.container.image=-v /:/x | cluster.container.image: got '-v /:/x', expected NAME:TAG
cluster.container.command="'docker" | cluster.container.command: got "'docker", expected a command line
cluster.container.command="  " | cluster.container.command: got '  ', expected a command line
cluster.container.run_options=[all] | cluster.container.run_options: got 'all' first, expected options
cluster.container.mounts=[data] | cluster.container.mounts[0]: got 'data', expected an absolute path
cluster.container.mounts=[/a:/b] | cluster.container.mounts[0]: got '/a:/b', expected an absolute path
cluster.container.mounts=[/a, /b/..:rw] | cluster.container.mounts[1]: got '/b/..:rw', expected an absolute path
cluster.ssh.user=-x | cluster.ssh.user: got '-x', expected a name without dash in front
{RANKS4} & cluster.topology_nodes=3 & attention.preset=burst | cluster.topology_nodes: 3 nodes cannot share 4 ranks
parallel.dp_shard_size=3 & {RANKS4} | parallel: dp_replicate_size 1 x dp_shard_size 3 = 3 does not divide the 4 ranks
parallel.cp_size=4 & parallel.dp_replicate_size=2 & {RANKS4} & attention.preset=burst |
    parallel: dp_replicate_size 2 x dp_shard_size 1 x cp_size 4 = 8, but there are 4 ranks
parallel.tp_size=4 & {RANKS4} & cluster.topology_nodes=2 |
    parallel.tp_size: got 4, which does not divide the 2 ranks of a node
model.num_heads=6 & model.num_kv_heads=3 & model.ffn_hidden_size=6 & parallel.tp_size=3 |
    parallel.tp_size: got 3, which does not divide model.vocab_size=256
{RANKS4} | attention=single holds the whole sequence on one rank, but 4 ranks share it
parallel.cp_size=2 | attention=single holds the whole sequence on one rank, but 2 ranks share it
attention.preset=burst & attention.ring_inner_size=3 & {RANKS4} |
    attention: head_parallel_size 1 x ring_inner_size 3 x ring_outer_size 1 = 3 ranks, but 4 ranks share
attention.preset=ring & attention.ring_inner_size=3 & attention.ring_outer_size=2 & parallel.cp_size=4 |
    attention: head_parallel_size 1 x ring_inner_size 3 x ring_outer_size 2 = 6 ranks, but 4 ranks
train.seq_len=3 & attention.preset=ring & {RANKS4} | train.seq_len: got 3 tokens for 4 ranks
""")
LEGAL = cases(f"""
memory.activation_checkpoint=auto
memory.checkpoint_layers=[attn_out_every, full] & memory.saved_fraction=1.0 & memory.moments_dtype=int8
{IN_BACKWARD}
model.num_heads=3 & model.num_kv_heads=1
model.rope_scaling.kind=linear & model.rope_scaling.factor=2.0
model.rope_scaling.kind=yarn & model.rope_scaling.original_seq_len=1
attention.mask=vertical_slash & attention.vertical_blocks=[]
attention.mask=vertical_slash & attention.documents=true & attention.layout=per_document
model.vocab_size=4096 & data.tokenizer=bpe
model.vocab_size=2 & data.format=shards & data.paths=[/]
model.require_init_from=true & train.checkpoint.resume_from=/run
memory.activation_store=host & memory.host_layers=1
train.guard.on_nonfinite=rewind & train.checkpoint.every_minutes=5.0
optimizer.warmup_steps=100
optimizer.schedule=wsd & optimizer.warmup_steps=50 & optimizer.decay_steps=50
optimizer.max_grad_norm=null & optimizer.beta1=0.0 & optimizer.weight_decay=0.0
train.profile=1:101
train.evaluate_only=true & train.checkpoint.resume_from=/run & train.guard.on_nonfinite=rewind
data.format=text & data.paths=[{__file__}, /tm*, {Path(__file__).parent}/**/test_config_checks.py] & data.bos="off"
data.mix_paths=[/tmp] & data.mix_weights=[0.5, 0.5]
data.length_buckets=[2, 3] & data.length_weights=[0.0, 0.3, 0.7]
{CHATS} & data.chat_template={__file__}
{CHATS} & data.chat_template=null & data.tokenizer={__file__}
{CHATS}
cluster.machine.name=h100 & cluster.machine.rates=[inter_bytes_per_s=25e9]
cluster.launcher=local & cluster.num_nodes=1
cluster.nodes=n[1-4] & cluster.python=~/venv/bin/python & cluster.node_folder=/scratch/me &
    cluster.environment=[A=b=c, B=]
cluster.launcher=slurm & cluster.slurm.time_limit=2-00:00:00 & cluster.slurm.options=[--reservation=x]
cluster.container.image=registry.local:5000/a/b@sha256:00 & cluster.container.command=sudo -n docker &
    cluster.container.mounts=[/a:rw] & cluster.container.run_options=[--gpus, all]
cluster.container.run_options=[] & cluster.python=/a:b/..c/python & cluster.shared_folder=/shared
cluster.launcher=kubernetes & cluster.container.image=a & cluster.kubernetes.claim=a-1 &
    cluster.kubernetes.memory_per_pod=1.5Gi & cluster.kubernetes.gpu_resource=a.b/c &
    cluster.kubernetes.node_selector=[k.io/a=B.c, a=]
parallel.dp_shard_size=4 & {RANKS4}
parallel.tp_size=2 & parallel.dp_shard_size=2 & {RANKS4}
parallel.dp_shard_size=2 & parallel.dp_replicate_size=2 & parallel.cp_size=1 & {RANKS4}
attention.preset=burst & {RANKS4} & cluster.topology_nodes=2
attention.preset=burst & attention.ring_inner_size=2 & attention.ring_outer_size=2 & {RANKS4}
attention.preset=ring & parallel.cp_size=3
""")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_reported_once(case: str) -> None:
    settings, text = case.split(" | ")
    with pytest.raises(ConfigError) as caught:
        check_run(config(settings))
    (problem,) = caught.value.problems
    assert problem.startswith(text)


@pytest.mark.parametrize("settings", ["", *LEGAL])
def test_a_legal_configuration_passes(settings: str) -> None:
    check_run(config(settings))


def test_a_tokenizer_trained_on_the_corpus_means_nothing_to_older_weights() -> None:
    text = "data.tokenizer=bpe is trained on this corpus, so the weights of model.init_from=/m know none of its tokens"
    told = {
        data: any(
            one.text.startswith(text)
            for one in problems(config(f"model.init_from=/m & model.vocab_size=4096 & data.tokenizer={data}"))
        )
        for data in ("bpe", "bytes", __file__, "bpe & data.format=shards & data.paths=[/]")
    }
    assert [data for data, is_told in told.items() if is_told] == ["bpe"]


def test_problems_do_not_show_values_of_variables() -> None:
    (problem,) = problems(config('cluster.environment=["TOKEN=canary-7f3a\\n"]'))
    assert "canary" not in problem.text


def test_variables_of_torchrun_or_burst_cannot_be_set() -> None:
    ours = ["BURST_RUN_ID", "BURST_NODE", "BURST_RANK_LOGS"]
    theirs = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    found = problems(config(f"cluster.environment=[{', '.join(f'{name}=1' for name in (*ours, *theirs))}]"))
    told = [*((name, "burst") for name in ours), *((name, "torchrun") for name in theirs)]
    assert [problem.text.partition(" for ")[0] for problem in found] == [
        f"cluster.environment[{index}]: {name} is set by {who}" for index, (name, who) in enumerate(told)
    ]


def test_paths_of_runs_on_other_machines_are_whole() -> None:
    given = "train.checkpoint.folder=a & model.init_from=c & data.mix_paths=[/d, e]"
    found = problems(config(f"cluster.launcher=ssh & {given} & data.mix_weights=[1.0, 1.0, 1.0]"))
    assert [problem.text.partition(" on the nodes")[0] for problem in found] == [
        "train.checkpoint.folder: got 'a', expected a path",
        "model.init_from: got 'c', expected a path",
        "data.mix_paths[1]: got 'e', expected a path",
    ]


@pytest.mark.parametrize(
    ("cluster", "is_looked_for"),
    [
        ("seed=0", True),
        ("cluster.launcher=slurm & cluster.num_nodes=2", True),
        ("cluster.nodes=n1", False),
        ("cluster.launcher=ssh", False),
        ("cluster.launcher=kubernetes", False),
    ],
)
def test_files_of_this_machine_are_looked_for_only_if_ranks_run_on_it(cluster: str, is_looked_for: bool) -> None:
    found = config(f"{cluster} & data.format=text & data.paths=[/none/corpus.txt]")
    assert any("no such file" in problem.text for problem in problems(found)) == is_looked_for
    assert found.cluster.runs_elsewhere != is_looked_for


def test_all_broken_rules_are_reported_together() -> None:
    optimizer = "optimizer.beta1=2.0 & optimizer.warmup_steps=500"
    broken = config(f"model.head_dim=63 & {optimizer} & train.profile=x & data.format=text & {RANKS4}")
    keys = [problem.text.partition(":")[0].partition(" ")[0] for problem in problems(broken)]
    expected = "optimizer.beta1 model.head_dim optimizer.warmup_steps train.profile data.paths attention=single"
    assert keys == expected.split()


def test_paths_start_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    relative = config("data.format=text & data.paths=[corpus.txt, corp*.txt]")
    assert len(problems(relative)) == 2
    monkeypatch.chdir(tmp_path)
    assert problems(relative) == []


def test_nonsense_numbers_give_one_message() -> None:
    around = f"{RANKS4} & attention.preset=ring"
    for value in (0, -1, -4):
        for key in (
            *("model.num_heads", "model.num_kv_heads", "model.head_dim", "parallel.cp_size", "parallel.tp_size"),
            *("parallel.dp_shard_size", "parallel.dp_replicate_size", "cluster.ranks_per_node"),
            *("cluster.topology_nodes", "attention.ring_inner_size", "attention.ring_outer_size"),
        ):
            found = problems(config(f"{around} & {key}={value}"))
            assert [problem.keys for problem in found] == [(key,)], key
