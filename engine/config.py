"""The run configuration: frozen dataclasses, every field documented, the unit in its name.

Standard library and PyYAML only: the command line and every rank import this module without torch.
YAML -> Hydra compose -> plain dict -> `RunConfig` (here) -> RUN/config.yaml -> every rank.
Rules between fields are in `engine.config_checks`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from engine.config_checkpoint import CheckpointConfig
from engine.config_cluster import ClusterConfig
from engine.config_guard import GuardConfig
from engine.config_reader import read_dataclass, to_plain
from engine.config_rope import RopeScalingConfig
from engine.config_schema import Problem, note
from engine.errors import ConfigError

# In C where PyYAML was built with libyaml: eight times faster.
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_NESTED = 4000  # the loader in C has no limit of its own: it would overflow the stack

Dtype = Literal["float32", "bfloat16"]
LayoutName = Literal["contiguous", "zigzag", "striped", "chunk_cyclic", "per_document", "balanced", "split_zigzag"]
PresetName = Literal[
    "single",
    "ring",
    "striped",
    "burst",
    "burst_ulysses",
    "ulysses",
    "loongtrain",
    "usp",
    "megatron_cp",
    "megatron_allgather",
    "megatron_hierarchical",
    "megatron_tp",
    "fpdt",
    "alst",
    "auto",
]
Placement = Literal["head_first", "context_first", "interleaved"]
KvTransport = Literal["p2p", "all_gather"]
BackwardOrder = Literal["same", "reversed"]
MaskKind = Literal["causal", "full", "window", "sink_window", "strided", "vertical_slash", "blocks"]
Circulates = Literal["kv", "q", "auto"]
CheckpointKind = Literal["none", "full", "attn_out", "seq_fraction", "attn_out_every"]
Store = Literal["device", "host"]
Bos = Literal["auto", "on", "off"]
MomentsDtype = Literal["float32", "int8"]
KernelName = Literal[
    "auto", "reference", "cpu_flash", "aten_flash", "aten_cudnn", "aten_efficient", "flash_attn", "fa3", "fa4"
]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-style decoder."""

    name: str = field(default="tiny", metadata=note("name of this shape, for tables; the option of the group model"))
    vocab_size: int = field(
        default=256, metadata=note("rows of the embedding and of the LM head", "tokens", at_least=2)
    )
    hidden_size: int = field(default=256, metadata=note("width of the residual stream", at_least=1))
    ffn_hidden_size: int = field(default=688, metadata=note("inner width of the SwiGLU feed-forward", at_least=1))
    num_layers: int = field(default=4, metadata=note("decoder layers", "layers", at_least=1))
    num_heads: int = field(default=4, metadata=note("query heads", "heads", at_least=1))
    num_kv_heads: int = field(
        default=4, metadata=note("key and value heads; fewer than num_heads: GQA", "heads", at_least=1)
    )
    head_dim: int = field(default=64, metadata=note("width of one head; even, for RoPE", at_least=2))
    rope_theta: float = field(default=10000.0, metadata=note("base of the rotary position wavelengths", above=0))
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    norm_eps: float = field(default=1e-5, metadata=note("added to the variance in RMSNorm", above=0))
    qkv_bias: bool = field(default=False, metadata=note("the projections to q, k and v add a bias, as in Qwen 2"))
    qk_norm: bool = field(default=False, metadata=note("RMSNorm over every head of q and k before RoPE, as in Qwen 3"))
    tie_embeddings: bool = field(default=False, metadata=note("the LM head uses the embedding's weight"))
    init_std: float = field(default=0.02, metadata=note("standard deviation of initial weights", above=0))
    init_from: str | None = field(
        default=None, metadata=note("folder of a Hugging Face model whose weights are the first ones; null: random")
    )
    require_init_from: bool = field(default=False, metadata=note("refuse to train from random weights"))


@dataclass(frozen=True)
class AttentionConfig:
    """A point in the space of distributed attention methods; null means: what the preset says."""

    preset: PresetName = field(default="single", metadata=note("a named point; the fields below move away from it"))
    layout: LayoutName | None = field(default=None, metadata=note("which positions each rank holds"))
    head_parallel_size: int | None = field(
        default=None, metadata=note("ranks that divide the heads among them (all-to-all)", "ranks", at_least=1)
    )
    ring_inner_size: int | None = field(
        default=None, metadata=note("ranks in the inner ring, inside a node", "ranks", at_least=1)
    )
    ring_outer_size: int | None = field(
        default=None, metadata=note("inner rings in the outer ring, between nodes", "rings", at_least=1)
    )
    placement: Placement | None = field(
        default=None,
        metadata=note("which ranks are neighbours: those that share heads, a ring, or an inner ring and then heads"),
    )
    kv_transport: KvTransport | None = field(
        default=None, metadata=note("keys and values hop from rank to rank, or go to everybody at once")
    )
    backward_circulates: Circulates | None = field(
        default=None, metadata=note("what travels in the backward pass: keys and values, or queries")
    )
    circulates_layers: tuple[Literal["kv", "q"], ...] = field(
        default=(), metadata=note("backward_circulates of the layers in turn, repeated; empty: the same for all")
    )
    backward_order: BackwardOrder | None = field(
        default=None, metadata=note("reversed: the backward ring starts from the last block held (kv only)")
    )
    tail_steps: int | None = field(
        default=None,
        metadata=note("tiles of the own node kept for the end of the backward ring, to hide its last hop", at_least=0),
    )
    gradient_wire_dtype: Dtype | None = field(
        default=None, metadata=note("number format of partial gradients while they travel")
    )
    chunk_tokens: int | None = field(
        default=None,
        metadata=note("run every layer in chunks of so many of a rank's tokens; null: whole", "tokens", at_least=1),
    )
    chunk_store: Store | None = field(
        default=None, metadata=note("where chunks that are not worked on lie (needs chunk_tokens)")
    )
    prefetch_chunks: int | None = field(
        default=None, metadata=note("chunks fetched ahead of their use (needs chunk_tokens)", "chunks", at_least=0)
    )
    mask: MaskKind = field(default="causal", metadata=note("which positions a token may look at"))
    mask_layers: tuple[MaskKind, ...] = field(
        default=(), metadata=note("masks of the layers in turn, repeated; empty: attention.mask for all")
    )
    documents: bool = field(
        default=False, metadata=note("no attention across the packed documents of the data (train.micro_batch_size=1)")
    )
    window_tokens: int | None = field(
        default=None, metadata=note("window, sink_window: keys seen, the token's own included", "tokens", at_least=1)
    )
    sink_tokens: int = field(
        default=4, metadata=note("sink_window: first tokens that all later ones see", "tokens", at_least=1)
    )
    block_tokens: int | None = field(
        default=None,
        metadata=note("block masks: tokens per block; null: 128, or what blocks_file says", "tokens", at_least=1),
    )
    block_stride: int = field(
        default=8, metadata=note("strided: every block_stride-th block is seen", "blocks", at_least=1)
    )
    local_blocks: int = field(
        default=2, metadata=note("strided: nearest blocks seen, the own included", "blocks", at_least=1)
    )
    vertical_blocks: tuple[int, ...] = field(
        default=(0,), metadata=note("vertical_slash: numbers of the blocks that all later ones see", "blocks")
    )
    slash_blocks: tuple[int, ...] = field(
        default=(0, 1), metadata=note("vertical_slash: distances at which a block is seen, 0 its own", "blocks")
    )
    blocks_file: str | None = field(
        default=None, metadata=note("blocks: file of [n, 2] (query block, key block) pairs: .npy, .npz or .json")
    )
    kernel: KernelName = field(default="auto", metadata=note("what computes one tile; auto: the fastest that is legal"))


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept for the backward pass, where it lies, and the memory that there is."""

    activation_checkpoint: CheckpointKind | Literal["auto"] = field(
        default="full",
        metadata=note(
            "what a layer keeps for backward; none: everything, full: its input, attn_out: that and attention's "
            "results, seq_fraction: that and attention's results of the last part of the sequence, attn_out_every: "
            "attention's results, and the input of every few layers, auto: the fastest that fits"
        ),
    )
    checkpoint_layers: tuple[CheckpointKind, ...] = field(
        default=(), metadata=note("policies of the layers in turn, repeated; empty: activation_checkpoint for all")
    )
    kept_fraction: float = field(
        default=0.5,
        metadata=note(
            "seq_fraction: share of the sequence, from its end, whose attention is not computed again",
            at_least=0,
            at_most=1,
        ),
    )
    every_layers: int = field(
        default=4, metadata=note("attn_out_every: layers per kept layer input", "layers", at_least=1)
    )
    activation_store: Store | None = field(
        default=None,
        metadata=note("where what is kept lies; null: in host memory under attention.chunk_store=host, else device"),
    )
    host_layers: int | None = field(
        default=None,
        metadata=note(
            "activation_store=host: so many layers, the first ones, keep there and the others on the device; null: all",
            "layers",
            at_least=1,
        ),
    )
    tile_tokens: int | None = field(
        default=None,
        metadata=note(
            "projections and MLP run on so many of a rank's tokens at a time; "
            "null: attention.chunk_tokens, model.hidden_size under attention=alst, otherwise all",
            "tokens",
            at_least=1,
        ),
    )
    optimizer_store: Store = field(
        default="device", metadata=note("where master weights, gradients and moments lie; host: and are updated there")
    )
    optimizer_in_backward: bool = field(
        default=False,
        metadata=note("update a layer as soon as its gradient is complete, which then is freed (no clipping)"),
    )
    moments_dtype: MomentsDtype = field(
        default="float32", metadata=note("number format of AdamW's moments; int8 needs torchao")
    )
    device_bytes: int | None = field(
        default=None, metadata=note("memory of one device to plan with; null: all it has", "bytes", at_least=1)
    )
    host_bytes: int | None = field(
        default=None,
        metadata=note("host memory of one node to plan with, for all its ranks; null: all it has", "bytes", at_least=1),
    )


@dataclass(frozen=True)
class LossConfig:
    """How logits become a loss."""

    kind: Literal["fused", "plain"] = field(
        default="fused", metadata=note("fused: LM head and loss together, never all logits at once")
    )
    chunk_tokens: int = field(default=2048, metadata=note("rows of logits alive at once (fused)", "tokens", at_least=1))
    z_loss: float = field(default=0.0, metadata=note("weight of the squared log of the partition function", at_least=0))


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks are divided: world_size = dp_replicate_size * dp_shard_size * cp_size * tp_size."""

    cp_size: int | None = field(
        default=None,
        metadata=note("ranks that share one sequence; null: all that data parallelism leaves", "ranks", at_least=1),
    )
    dp_shard_size: int = field(
        default=1, metadata=note("ranks that share parameters and read different sequences (FSDP)", "ranks", at_least=1)
    )
    tp_size: int = field(
        default=1, metadata=note("ranks that split every matrix, and the rows between layers", "ranks", at_least=1)
    )
    dp_replicate_size: int = field(default=1, metadata=note("copies of the sharded model (HSDP)", "copies", at_least=1))
    reshard_after_forward: bool = field(
        default=True, metadata=note("free gathered parameters after the forward pass and gather them again")
    )
    message_sms: int | None = field(
        default=None,
        metadata=note("of a GPU, which kernels leave to attention's messages", "multiprocessors", at_least=1),
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = field(default=3e-4, metadata=note("highest learning rate", above=0))
    schedule: Literal["cosine", "constant", "wsd"] = field(
        default="cosine", metadata=note("course of the learning rate after warm-up; wsd: flat, then a final decay")
    )
    warmup_steps: int = field(default=0, metadata=note("linear rise from 0 to learning_rate", "steps", at_least=0))
    decay_steps: int | None = field(
        default=None, metadata=note("wsd: length of the final decay; null: a tenth of all steps", "steps", at_least=1)
    )
    min_learning_rate_ratio: float = field(
        default=0.1, metadata=note("last learning rate as a share of the highest", at_least=0, at_most=1)
    )
    beta1: float = field(default=0.9, metadata=note("decay of the gradient's mean", at_least=0, below=1))
    beta2: float = field(default=0.95, metadata=note("decay of the squared gradient's mean", at_least=0, below=1))
    epsilon: float = field(default=1e-8, metadata=note("added to the denominator", above=0))
    weight_decay: float = field(default=0.1, metadata=note("decoupled; not on norms", at_least=0))
    max_grad_norm: float | None = field(
        default=1.0, metadata=note("clip the global gradient norm to this; null: never", above=0)
    )


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    seq_len: int = field(
        default=4096, metadata=note("length of one sequence, over all its ranks", "tokens", at_least=1)
    )
    steps: int = field(default=100, metadata=note("optimizer steps", "steps", at_least=1))
    micro_batch_size: int = field(
        default=1, metadata=note("sequences per data-parallel rank and micro-step", "sequences", at_least=1)
    )
    grad_accum_steps: int = field(default=1, metadata=note("micro-steps per optimizer step", "micro-steps", at_least=1))
    compute_dtype: Dtype = field(default="bfloat16", metadata=note("number format of matrix products"))
    deterministic: bool = field(
        default=False, metadata=note("equal runs give equal bits, on a GPU too; kernels that cannot are not used")
    )
    dropout: float = field(
        default=0.0,
        metadata=note(
            "share of what attention and the MLP add to the residual stream that is dropped in training",
            at_least=0,
            below=1,
        ),
    )
    eval_interval_steps: int | None = field(
        default=None, metadata=note("steps between validations; null: only at the end", "steps", at_least=1)
    )
    eval_samples: int = field(default=8, metadata=note("sequences per validation", "sequences", at_least=1))
    eval_position_buckets: int = field(
        default=1, metadata=note("validation loss by position: the last half, the quarter before it, ...", at_least=1)
    )
    eval_needle_depths: int = field(
        default=0,
        metadata=note(
            "depths, evenly from the start of the sequence to its end, at which a sentence is hidden and asked for; "
            "0: none",
            "depths",
            at_least=0,
        ),
    )
    eval_needle_samples: int = field(
        default=4, metadata=note("texts in which a sentence is hidden at every depth", "texts", at_least=1)
    )
    evaluate_only: bool = field(
        default=False, metadata=note("evaluate weights of checkpoint.resume_from or model.init_from, and train nothing")
    )
    warmup_metric_steps: int = field(
        default=3, metadata=note("first steps left out of the medians", "steps", at_least=0)
    )
    compile: bool = field(default=False, metadata=note("torch.compile every layer"))
    tensorboard: bool = field(default=False, metadata=note("also write TensorBoard events into the run folder"))
    profile: str | None = field(
        default=None, metadata=note("START:STOP, the steps that torch.profiler traces into RUN/profile/", "steps")
    )
    peak_flops_per_device: float | None = field(
        default=None,
        metadata=note("what MFU is measured against; null: by device name, measured on CPU", "FLOP/s", above=0),
    )
    log_interval_steps: int = field(default=1, metadata=note("steps between lines of progress", "steps", at_least=1))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    format: Literal["stdlib", "text", "jsonl", "parquet", "shards"] = field(
        default="stdlib", metadata=note("kind of files; stdlib: the source of Python's own library, found everywhere")
    )
    paths: tuple[str, ...] = field(default=(), metadata=note("files, folders or globs; empty only for stdlib"))
    text_field: str = field(default="text", metadata=note("key (JSONL) or column (parquet) that holds the text"))
    prompt_field: str | None = field(
        default=None,
        metadata=note("key (JSONL) of what comes before the text: read, but not learned; null: all text is learned"),
    )
    messages_field: str | None = field(
        default=None,
        metadata=note("key (JSONL) of conversations: lists of {role, content}, of which the assistant's are learned"),
    )
    chat_template: str | None = field(
        default=None,
        metadata=note('what renders conversations: "chatml" or a .jinja file; null: the one beside the tokenizer'),
    )
    tokenizer: str = field(
        default="bytes", metadata=note('"bytes", "bpe" (trained on the corpus) or the path of a tokenizer.json')
    )
    bos: Bos = field(default="auto", metadata=note("first token of documents; auto: as the tokenizer's template"))
    bpe_vocab_size: int = field(default=4096, metadata=note("size of a trained BPE vocabulary", "tokens", at_least=257))
    prepared_dir: str | None = field(
        default=None, metadata=note("folder of token shards; null: one in the cache, named by content")
    )
    validation_fraction: float = field(
        default=0.01, metadata=note("share of the corpus kept for validation", above=0, below=1)
    )
    echo_tokens: int | None = field(
        default=None,
        metadata=note(
            "read every so many tokens of this corpus twice in a row: what a toy needs a long context for; null: once",
            "tokens",
            at_least=1,
        ),
    )
    mix_paths: tuple[str, ...] = field(
        default=(), metadata=note("prepared folders that training samples are taken from, too (data.mix_weights)")
    )
    mix_weights: tuple[float, ...] = field(
        default=(), metadata=note("shares of this corpus and of each of data.mix_paths among the samples")
    )
    length_buckets: tuple[int, ...] = field(
        default=(), metadata=note("lengths of documents at which classes of samples are divided, ascending", "tokens")
    )
    length_weights: tuple[float, ...] = field(
        default=(), metadata=note("shares of the classes of data.length_buckets among the samples, one more; sum 1")
    )
    max_bytes: int | None = field(
        default=None, metadata=note("stop reading the corpus after so much text", "bytes", at_least=1)
    )


@dataclass(frozen=True)
class RunConfig:
    """Everything a run needs; written to RUN/config.yaml and read by every rank."""

    exp: str = field(default="tiny", metadata=note("name of the experiment: the folder of its runs"))
    seed: int = field(default=0, metadata=note("seed of initial weights and of the order of data", at_least=0))
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def read_config(values: Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """(the configuration, every unknown key and wrong type); a mistaken field has its default."""
    config, problems = read_dataclass(RunConfig, values)
    assert isinstance(config, RunConfig)
    return config, problems


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The configuration that these plain values spell; absent fields take their defaults.

    Raises ConfigError with every unknown key, wrong type and illegal choice at once. Does not check fields
    against one another or against files: that is `engine.config_checks.check_config`.
    """
    config, problems = read_config(values)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration in dicts, lists and scalars; `config_from_dict` turns it back."""
    plain = to_plain(config)
    assert isinstance(plain, dict)
    return plain


def load_config(path: str | Path) -> RunConfig:
    """The configuration in a YAML file, such as RUN/config.yaml. Raises ConfigError, naming the file."""
    try:
        values = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        place = " ".join(str(error).split())
        raise ConfigError(f"{path}: not readable as YAML: {place}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a table of settings such as `seed: 0`, got {type(values).__name__}")
    try:
        return config_from_dict(values)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


def load_yaml(text: str) -> Any:
    """What a YAML text says. Raises yaml.YAMLError, RecursionError for what is nested without end."""
    openings = sum(text.count(sign) for sign in ("[", "{", "- ", "? "))
    return yaml.load(text, _YAML_LOADER if openings < _MOST_NESTED else yaml.SafeLoader)  # noqa: S506 - both are safe


def dump_config(config: RunConfig) -> str:
    """The configuration as YAML text with every field present; `load_config` reads it back unchanged."""
    text = yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)
    if all(line.isprintable() for line in text.split("\n")):
        return text
    # PyYAML writes Unicode's own line ends (U+0085) as they are and reads them back as another character.
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def config_fingerprint(config: RunConfig) -> str:
    """64 hex digits (SHA-256 over canonical JSON): equal exactly when every field is equal."""
    canonical = json.dumps(config_to_dict(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
