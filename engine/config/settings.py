"""The run configuration: frozen dataclasses with every field documented and the unit in its name.

    YAML -> Hydra compose -> plain dict -> `RunConfig` (here) -> RUN/config.yaml -> every rank

Standard library and PyYAML only: the command line and every rank import this module without torch. Rules between fields
are in `engine.resolve.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.model_parts import LinearLayersConfig, LoraConfig
from engine.config.schema import JsonObject, read_dataclass, setting, to_plain
from engine.config.yaml_text import ConfigDumper, load_yaml, read_text, yaml_problem

Dtype = Literal["float32", "bfloat16"]
Implementation = Literal["burst", "hf"]
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
KvForm = Literal["auto", "latent", "expanded"]
MaskKind = Literal["causal", "full", "window", "sink_window", "strided", "vertical_slash", "blocks", "no_attention"]
Circulates = Literal["kv", "q", "auto"]
CheckpointKind = Literal["none", "full", "attn_out", "seq_fraction", "attn_out_every"]
Store = Literal["device", "host"]
Bos = Literal["auto", "off"]
MomentsDtype = Literal["float32", "int8"]
RopeScalingKind = Literal["none", "linear", "ntk", "yarn", "llama3"]
Reaction = Literal["stop", "skip", "rewind"]
KernelName = Literal[
    "auto", "reference", "cpu_flash", "aten_flash", "aten_cudnn", "aten_efficient", "flash_attn", "fa3", "fa4"
]


@dataclass(frozen=True)
class RopeScalingConfig:
    """RoPE scaling for sequences longer than the model was trained on; formulas in engine/model/rope.py."""

    kind: RopeScalingKind = setting(
        "none",
        "linear: scale all wavelengths (Chen et al. 2023); ntk: a larger base; yarn: long wavelengths only, and an "
        "attention factor (Peng et al. 2023); llama3: the rule of Llama 3.1",
    )
    factor: float = setting(1.0, "factor by which sequences become longer", at_least=1)
    original_seq_len: int | None = setting(
        None, "length the model was trained on; yarn and llama3 need it", "tokens", at_least=1
    )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: its shape and whose code computes it."""

    name: str = setting("tiny", "name of this shape in tables; the option of the group model")
    implementation: Implementation = setting("burst", "burst: this engine's decoder; hf: transformers' own code")
    hf_config: JsonObject | None = setting(None, "config.json of the model, for hf; other settings must agree with it")
    vocab_size: int = setting(256, "rows of the embedding and of the LM head", "tokens", at_least=2)
    hidden_size: int = setting(256, "width of the residual stream", at_least=1)
    ffn_hidden_size: int = setting(688, "inner width of the SwiGLU feed-forward", at_least=1)
    num_layers: int = setting(4, "decoder layers", "layers", at_least=1)
    num_heads: int = setting(4, "query heads", "heads", at_least=1)
    num_kv_heads: int = setting(4, "key and value heads; fewer than num_heads: GQA", "heads", at_least=1)
    head_dim: int = setting(64, "size of one head of q and k; even, for RoPE", at_least=2)
    v_head_dim: int | None = setting(None, "hf: size of one head of v; null: head_dim", at_least=1)
    kv_lora_rank: int | None = setting(None, "hf: width of the compressed keys and values (MLA)", at_least=1)
    q_lora_rank: int | None = setting(None, "hf: width of the compressed queries (MLA); null: whole", at_least=1)
    rope_head_dim: int | None = setting(None, "hf: part of head_dim that RoPE turns (MLA)", at_least=1)
    gated_attention: bool = setting(False, "hf: attention's results have a gate, which q_proj computes beside q")
    linear_layers: LinearLayersConfig = LinearLayersConfig()
    gated_ffn: bool = setting(True, "hf: the feed-forward has a gate, so three matrices; false: two")
    num_moe_layers: int = setting(0, "hf: layers whose feed-forward is a mixture of experts", "layers", at_least=0)
    num_experts: int = setting(0, "hf: experts of such a layer", "experts", at_least=0)
    experts_per_token: int = setting(0, "hf: experts that compute a token", "experts", at_least=0)
    expert_ffn_hidden_size: int = setting(0, "hf: inner width of one expert", at_least=0)
    shared_expert_ffn_hidden_size: int = setting(0, "hf: inner width of experts that compute every token", at_least=0)
    gated_shared_expert: bool = setting(False, "hf: the results of these experts have a gate, a number per token")
    rope_theta: float = setting(10000.0, "base of the RoPE frequencies", above=0)
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    norm_eps: float = setting(1e-5, "added to the mean of squares in RMSNorm", above=0)
    qkv_bias: bool = setting(False, "bias in the q, k and v projections, as in Qwen 2")
    qk_norm: bool = setting(False, "RMSNorm over every head of q and k before RoPE, as in Qwen 3")
    tie_embeddings: bool = setting(False, "share the weight of embedding and LM head")
    init_std: float = setting(0.02, "standard deviation of initial weights", above=0)
    init_from: str | None = setting(None, "folder of a Hugging Face model to take initial weights from; null: random")
    lora: LoraConfig = LoraConfig()
    require_init_from: bool = setting(False, "refuse to start from random weights")


@dataclass(frozen=True)
class AttentionConfig:
    """A distributed attention method; null takes the preset's value."""

    preset: PresetName = setting("single", "a published method; the fields below change single properties of it")
    layout: LayoutName | None = setting(None, "how positions are assigned to ranks")
    head_parallel_size: int | None = setting(
        None, "ranks that divide the heads among them (all-to-all)", "ranks", at_least=1
    )
    ring_inner_size: int | None = setting(None, "ranks in an inner ring, within a node", "ranks", at_least=1)
    ring_outer_size: int | None = setting(None, "inner rings in the outer ring, across nodes", "rings", at_least=1)
    placement: Placement | None = setting(
        None, "which ranks are adjacent: those that share heads, a ring, or an inner ring and then heads"
    )
    kv_transport: KvTransport | None = setting(
        None, "p2p: keys and values move from rank to rank; all_gather: every rank sends them to all readers"
    )
    backward_circulates: Circulates | None = setting(
        None, "moving operand of the backward pass: keys and values, or queries"
    )
    backward_order: BackwardOrder | None = setting(
        None, "reversed: the backward ring starts from the last block of the forward ring (kv only)"
    )
    gradient_wire_dtype: Dtype | None = setting(None, "dtype in which partial gradients are sent")
    chunk_tokens: int | None = setting(
        None, "run every layer in chunks of this many of a rank's tokens; null: whole", "tokens", at_least=1
    )
    chunk_store: Store | None = setting(None, "where chunks that are not in use are stored (needs chunk_tokens)")
    prefetch_chunks: int | None = setting(
        None, "chunks loaded ahead of their use (needs chunk_tokens)", "chunks", at_least=0
    )
    mask: MaskKind = setting("causal", "which positions a token attends to")
    mask_layers: tuple[MaskKind, ...] = setting(
        (),
        "masks per layer, repeated as a pattern; empty: attention.mask for all; no_attention: the layer is linear "
        "(model.linear_layers)",
    )
    documents: bool = setting(False, "no attention across the packed documents of the data (train.micro_batch_size=1)")
    window_tokens: int | None = setting(
        None, "window, sink_window: keys a token attends to, itself included", "tokens", at_least=1
    )
    sink_tokens: int = setting(4, "sink_window: first tokens, which all later ones attend to", "tokens", at_least=1)
    block_tokens: int | None = setting(
        None, "block masks: tokens per block; null: that of blocks_file, else 128", "tokens", at_least=1
    )
    block_stride: int = setting(8, "strided: every block_stride-th block is attended to", "blocks", at_least=1)
    local_blocks: int = setting(
        2, "strided: nearest blocks attended to, including that of the token", "blocks", at_least=1
    )
    vertical_blocks: tuple[int, ...] = setting(
        (0,), "vertical_slash: numbers of the blocks that all later ones attend to", "blocks"
    )
    slash_blocks: tuple[int, ...] = setting(
        (0, 1), "vertical_slash: distances of the blocks attended to; 0: that of the token", "blocks"
    )
    blocks_file: str | None = setting(
        None, "blocks: file of [n, 2] (query block, key block) pairs: .npy, .npz or .json"
    )
    kernel: KernelName = setting("auto", "kernel that computes one tile; auto: the fastest that is legal")
    check_plans: bool = setting(False, "for debugging: ranks compare both ends of all messages before every step")


@dataclass(frozen=True)
class MemoryConfig:
    """Activation checkpointing, where tensors are stored, and the memory to plan with."""

    activation_checkpoint: CheckpointKind | Literal["auto"] = setting(
        "full",
        "what a layer saves for backward; none: everything, full: its input, attn_out: its input and attention's "
        "results, seq_fraction: its input and attention's results for the last part of the sequence, attn_out_every: "
        "attention's results, and the input of every few layers, auto: the fastest that fits",
    )
    checkpoint_layers: tuple[CheckpointKind, ...] = setting(
        (), "policies per layer, repeated as a pattern; empty: activation_checkpoint for all"
    )
    saved_fraction: float = setting(
        0.5,
        "seq_fraction: fraction of the sequence, at its end, whose attention is not recomputed",
        at_least=0,
        at_most=1,
    )
    every_layers: int = setting(4, "attn_out_every: layers per saved layer input", "layers", at_least=1)
    activation_store: Store | None = setting(
        None, "where saved activations are stored; null: host with attention.chunk_store=host, else device"
    )
    host_layers: int | None = setting(
        None,
        "activation_store=host: number of layers, from the first, that save to the host; null: all",
        "layers",
        at_least=1,
    )
    tile_tokens: int | None = setting(
        None,
        "run projections and MLP on this many of a rank's tokens at a time; "
        "null: attention.chunk_tokens, model.hidden_size with attention=alst, otherwise all",
        "tokens",
        at_least=1,
    )
    optimizer_store: Store = setting(
        "device", "where master weights, gradients and moments are stored; host: they are also updated there"
    )
    optimizer_in_backward: bool = setting(
        False, "update a layer as soon as its gradient is complete, then free the gradient (no clipping)"
    )
    moments_dtype: MomentsDtype = setting("float32", "dtype of AdamW's moments; int8 needs torchao")
    device_bytes: int | None = setting(None, "memory of one device to plan with; null: all of it", "bytes", at_least=1)
    host_bytes: int | None = setting(
        None, "host memory of one node to plan with, for all its ranks; null: all of it", "bytes", at_least=1
    )


@dataclass(frozen=True)
class LossConfig:
    """The fused cross entropy."""

    chunk_tokens: int = setting(2048, "rows of logits computed together", "tokens", at_least=1)
    z_loss: float = setting(0.0, "weight of the squared log of the partition function", at_least=0)


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism: world_size = dp_replicate_size * dp_shard_size * cp_size * tp_size."""

    cp_size: int | None = setting(
        None, "ranks that share one sequence; null: all that the other degrees leave", "ranks", at_least=1
    )
    dp_shard_size: int = setting(
        1, "ranks that share parameters and read different sequences (FSDP)", "ranks", at_least=1
    )
    tp_size: int = setting(1, "ranks that split every matrix, and the rows between layers", "ranks", at_least=1)
    dp_replicate_size: int = setting(1, "copies of the sharded model (HSDP)", "copies", at_least=1)
    comm_sms: int | None = setting(
        None, "SMs of a GPU that kernels leave free for attention's messages", "multiprocessors", at_least=1
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    learning_rate: float = setting(3e-4, "peak learning rate", above=0)
    schedule: Literal["cosine", "constant", "wsd"] = setting(
        "cosine", "learning rate after warm-up; wsd: constant, then a final decay"
    )
    warmup_steps: int = setting(0, "linear rise from 0 to learning_rate", "steps", at_least=0)
    decay_steps: int | None = setting(
        None, "wsd: length of the final decay; null: a tenth of all steps", "steps", at_least=1
    )
    min_learning_rate_ratio: float = setting(0.1, "final learning rate / peak learning rate", at_least=0, at_most=1)
    beta1: float = setting(0.9, "decay rate of the first moment", at_least=0, below=1)
    beta2: float = setting(0.95, "decay rate of the second moment", at_least=0, below=1)
    epsilon: float = setting(1e-8, "added to the denominator", above=0)
    weight_decay: float = setting(0.1, "decoupled weight decay; not on norms and biases", at_least=0)
    max_grad_norm: float | None = setting(1.0, "clip the global gradient norm to this; null: do not clip", above=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When and where the training state is saved. Off unless one of the first three is set."""

    at_end: bool = setting(False, "save when the run ends or is stopped")
    every_steps: int | None = setting(None, "steps between checkpoints", "steps", at_least=1)
    every_minutes: float | None = setting(None, "time between checkpoints", "minutes", above=0)
    keep_last: int = setting(2, "number of newest checkpoints to retain", "checkpoints", at_least=2)
    in_background: bool = setting(
        False, "train while a copy in host memory is written: 12 bytes per parameter, sharded"
    )
    stop_grace_s: float = setting(
        60.0, "time for a run that is stopped to end its step and save", "seconds", at_least=12
    )
    folder: str | None = setting(
        None, "folder of checkpoints, by run id; null: in cluster.shared_folder, else in the run folder"
    )
    resume_from: str | None = setting(
        None, "RUN, or the path of a run or a checkpoint, to continue from, with any number of ranks and any method"
    )

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are written; if so, also at the end and when the run is stopped."""
        return self.at_end or self.is_periodic

    @property
    def is_periodic(self) -> bool:
        """Whether checkpoints are written before the end."""
        return self.every_steps is not None or self.every_minutes is not None


@dataclass(frozen=True)
class GuardConfig:
    """Reaction to a step whose loss or gradient is not finite, or whose loss spikes."""

    on_nonfinite: Reaction = setting(
        "stop",
        "if loss or gradient norm is NaN or infinite; stop: end the run, skip: do not update the weights, "
        "rewind: restore the newest checkpoint and continue with the data after this step",
    )
    on_spike: Reaction = setting("skip", "if the loss is far above recent ones; values as of on_nonfinite")
    spike_deviations: float | None = setting(
        None, "deviations above the recent median at which a loss is a spike; null: never", above=0
    )

    @property
    def reactions(self) -> frozenset[Reaction]:
        """All reactions that may occur."""
        return frozenset({self.on_nonfinite, *(() if self.spike_deviations is None else (self.on_spike,))})

    @property
    def may_drop(self) -> bool:
        """Whether a step must be judged before the weights are updated."""
        return self.reactions != {"stop"} or self.spike_deviations is not None


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    seq_len: int = setting(4096, "length of one sequence, over all its ranks", "tokens", at_least=1)
    steps: int = setting(100, "optimizer steps", "steps", at_least=1)
    micro_batch_size: int = setting(1, "sequences per data-parallel rank and micro-step", "sequences", at_least=1)
    grad_accum_steps: int = setting(1, "micro-steps per optimizer step", "micro-steps", at_least=1)
    compute_dtype: Dtype = setting("bfloat16", "dtype of matrix products")
    deterministic: bool = setting(False, "bitwise reproducible, on a GPU too; kernels that are not are not used")
    dropout: float = setting(
        0.0,
        "dropout rate of the outputs of attention and MLP, before the residual connection",
        at_least=0,
        below=1,
    )
    eval_interval_steps: int | None = setting(
        None, "steps between validations; null: only at the end", "steps", at_least=1
    )
    eval_samples: int = setting(8, "sequences per validation", "sequences", at_least=1)
    eval_position_buckets: int = setting(
        1, "validation loss by position: the last half, the quarter before it, ...", at_least=1
    )
    eval_needle_depths: int = setting(
        0,
        "needle in a haystack: depths, evenly spaced over the sequence, at which a needle is placed; 0: no such test",
        "depths",
        at_least=0,
    )
    eval_needle_samples: int = setting(4, "needle in a haystack: texts per depth", "texts", at_least=1)
    evaluate_only: bool = setting(
        False, "evaluate the weights of checkpoint.resume_from or model.init_from without training"
    )
    compile: bool = setting(False, "torch.compile every layer")
    tensorboard: bool = setting(False, "also write TensorBoard events into the run folder")
    profile: str | None = setting(None, "START:STOP, the steps that torch.profiler traces into RUN/profile/", "steps")
    peak_flops_per_device: float | None = setting(
        None, "peak that MFU refers to; null: by device name, measured on CPU", "FLOP/s", above=0
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()


# Prose and source code; no data files, which have other formats.
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml", ".txt.gz"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".js"),
    *(".jsx", ".ts", ".tsx", ".rb", ".pl", ".php", ".swift", ".lua", ".jl", ".r", ".R", ".hs", ".ml", ".sql", ".sh"),
    *(".css", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
)


@dataclass(frozen=True)
class DataConfig:
    """The training corpus and its tokenizer."""

    format: Literal["stdlib", "text", "jsonl", "parquet", "shards"] = setting(
        "stdlib", "kind of files; stdlib: the source code of Python's standard library, present everywhere"
    )
    paths: tuple[str, ...] = setting((), "files, folders or globs; empty only for stdlib")
    text_suffixes: tuple[str, ...] = setting(
        (),
        "data.format=text: suffixes of the files to read in a folder; empty: prose and source code (.txt, .py, ...)",
    )
    on_bad_row: Literal["refuse", "skip"] = setting(
        "refuse", "if a row (or a text file) cannot be read; skip: leave it out and count it"
    )
    text_field: str = setting("text", "key (JSONL) or column (parquet) that holds the text")
    prompt_field: str | None = setting(
        None, "key (JSONL) of a prompt before the text, which gets no labels; null: all tokens are labels"
    )
    messages_field: str | None = setting(
        None, "key (JSONL) of conversations: lists of {role, content}; the assistant's messages are labels"
    )
    chat_template: str | None = setting(
        None, 'template of conversations: "chatml" or a .jinja file; null: that of the tokenizer'
    )
    tokenizer: str = setting(
        "bytes", '"bytes", "bpe" (trained on the corpus) or the path of a tokenizer.json or of its folder'
    )
    bos: Bos = setting("auto", "BOS token of documents; auto: as the template in tokenizer.json adds it, off: none")
    bpe_vocab_size: int = setting(4096, "vocabulary size of a trained BPE tokenizer", "tokens", at_least=257)
    prepared_dir: str | None = setting(None, "folder of token shards; null: one in the cache, named by content")
    validation_fraction: float = setting(0.01, "fraction of the corpus held out for validation", above=0, below=1)
    echo_tokens: int | None = setting(
        None,
        "repeat every block of this many tokens once, a toy task that needs long context; null: do not",
        "tokens",
        at_least=1,
    )
    mix_paths: tuple[str, ...] = setting((), "prepared folders to mix into training samples (data.mix_weights)")
    mix_weights: tuple[float, ...] = setting((), "sampling weights of this corpus and of each of data.mix_paths")
    length_buckets: tuple[int, ...] = setting(
        (), "ascending document lengths that separate the length buckets of samples", "tokens"
    )
    length_weights: tuple[float, ...] = setting(
        (), "sampling weights of the length buckets, one more than data.length_buckets; sum 1"
    )
    max_bytes: int | None = setting(None, "stop reading the corpus after this much text", "bytes", at_least=1)

    @property
    def resolved_text_suffixes(self) -> tuple[str, ...]:
        """The suffixes to read: those given, else TEXT_SUFFIXES."""
        return self.text_suffixes or TEXT_SUFFIXES

    @property
    def tokenizer_path(self) -> Path | None:
        """Path of the tokenizer's folder or tokenizer.json; None for `bytes` and `bpe`."""
        return None if self.tokenizer in ("bytes", "bpe") else Path(self.tokenizer).expanduser()


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of a run; written to RUN/config.yaml and read by every rank."""

    exp: str = setting("tiny", "name of the experiment: the folder of its runs")
    seed: int = setting(0, "seed of initial weights and data order", at_least=0)
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    memory: MemoryConfig = MemoryConfig()
    loss: LossConfig = LossConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    cluster: ClusterConfig = ClusterConfig()


def config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Build a configuration from plain values; missing fields take their defaults.

    Does not check fields against each other or against files: `engine.resolve.rules.check_config` does.

    Raises:
        ConfigError: With all unknown keys, wrong types and illegal choices together.
    """
    config, problems = read_dataclass(RunConfig, values)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config


def load_config(path: str | Path) -> RunConfig:
    """Read a configuration from a YAML file such as RUN/config.yaml. Raises ConfigError that names the file."""
    text = ""
    try:
        text = read_text(path)
        values = load_yaml(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this configuration: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {yaml_problem(error, text)}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a table of settings such as `seed: 0`, got {type(values).__name__}")
    try:
        return config_from_dict(values)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


def dump_config(config: RunConfig) -> str:
    """Return the configuration as YAML text with every field; `load_config` reads it back unchanged."""
    plain = to_plain(config)
    text = yaml.dump(plain, Dumper=ConfigDumper, sort_keys=False, allow_unicode=True)
    if all(line.isprintable() for line in text.split("\n")):
        return text
    # PyYAML writes Unicode line ends (U+0085) unescaped and reads them back as another character.
    return yaml.dump(plain, Dumper=ConfigDumper, sort_keys=False)
