"""The run configuration: frozen dataclasses, every field documented, the unit in its name.

Standard library and PyYAML only: the command line and every rank import this module without torch.
YAML -> Hydra compose -> plain dict -> `RunConfig` (here) -> RUN/config.yaml -> every rank.
Rules between fields are in `engine.resolve.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.schema import read_dataclass, setting, to_plain
from engine.config.yaml_text import ConfigDumper, load_yaml, read_text, yaml_problem

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
Bos = Literal["auto", "off"]
MomentsDtype = Literal["float32", "int8"]
RopeScalingKind = Literal["none", "linear", "ntk", "yarn", "llama3"]
Reaction = Literal["stop", "skip", "rewind"]
KernelName = Literal[
    "auto", "reference", "cpu_flash", "aten_flash", "aten_cudnn", "aten_efficient", "flash_attn", "fa3", "fa4"
]


@dataclass(frozen=True)
class RopeScalingConfig:
    """How the wavelengths of RoPE are stretched; formulas in engine/model/rope.py."""

    kind: RopeScalingKind = setting(
        "none",
        "linear: all alike (Chen et al. 2023); ntk: by a larger base; yarn: long ones only, and sharper attention "
        "(Peng et al. 2023); llama3: the rule of Llama 3.1",
    )
    factor: float = setting(1.0, "how much longer sequences become", at_least=1)
    original_seq_len: int | None = setting(
        None, "length the model was trained on; yarn and llama3 need it", "tokens", at_least=1
    )


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-style decoder."""

    name: str = setting("tiny", "name of this shape, for tables; the option of the group model")
    vocab_size: int = setting(256, "rows of the embedding and of the LM head", "tokens", at_least=2)
    hidden_size: int = setting(256, "width of the residual stream", at_least=1)
    ffn_hidden_size: int = setting(688, "inner width of the SwiGLU feed-forward", at_least=1)
    num_layers: int = setting(4, "decoder layers", "layers", at_least=1)
    num_heads: int = setting(4, "query heads", "heads", at_least=1)
    num_kv_heads: int = setting(4, "key and value heads; fewer than num_heads: GQA", "heads", at_least=1)
    head_dim: int = setting(64, "width of one head; even, for RoPE", at_least=2)
    rope_theta: float = setting(10000.0, "base of the rotary position wavelengths", above=0)
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    norm_eps: float = setting(1e-5, "added to the variance in RMSNorm", above=0)
    qkv_bias: bool = setting(False, "the projections to q, k and v add a bias, as in Qwen 2")
    qk_norm: bool = setting(False, "RMSNorm over every head of q and k before RoPE, as in Qwen 3")
    tie_embeddings: bool = setting(False, "the LM head uses the embedding's weight")
    init_std: float = setting(0.02, "standard deviation of initial weights", above=0)
    init_from: str | None = setting(
        None, "folder of a Hugging Face model whose weights are the first ones; null: random"
    )
    require_init_from: bool = setting(False, "refuse to train from random weights")


@dataclass(frozen=True)
class AttentionConfig:
    """A point in the space of distributed attention methods; null means: what the preset says."""

    preset: PresetName = setting("single", "a named point; the fields below move away from it")
    layout: LayoutName | None = setting(None, "which positions each rank holds")
    head_parallel_size: int | None = setting(
        None, "ranks that divide the heads among them (all-to-all)", "ranks", at_least=1
    )
    ring_inner_size: int | None = setting(None, "ranks in the inner ring, inside a node", "ranks", at_least=1)
    ring_outer_size: int | None = setting(None, "inner rings in the outer ring, between nodes", "rings", at_least=1)
    placement: Placement | None = setting(
        None, "which ranks are neighbours: those that share heads, a ring, or an inner ring and then heads"
    )
    kv_transport: KvTransport | None = setting(
        None, "keys and values hop from rank to rank, or go to everybody at once"
    )
    backward_circulates: Circulates | None = setting(
        None, "what travels in the backward pass: keys and values, or queries"
    )
    backward_order: BackwardOrder | None = setting(
        None, "reversed: the backward ring starts from the last block held (kv only)"
    )
    gradient_wire_dtype: Dtype | None = setting(None, "number format of partial gradients while they travel")
    chunk_tokens: int | None = setting(
        None, "run every layer in chunks of so many of a rank's tokens; null: whole", "tokens", at_least=1
    )
    chunk_store: Store | None = setting(None, "where chunks that are not worked on lie (needs chunk_tokens)")
    prefetch_chunks: int | None = setting(
        None, "chunks fetched ahead of their use (needs chunk_tokens)", "chunks", at_least=0
    )
    mask: MaskKind = setting("causal", "which positions a token may look at")
    mask_layers: tuple[MaskKind, ...] = setting(
        (), "masks of the layers in turn, repeated; empty: attention.mask for all"
    )
    documents: bool = setting(False, "no attention across the packed documents of the data (train.micro_batch_size=1)")
    window_tokens: int | None = setting(
        None, "window, sink_window: keys seen, the token's own included", "tokens", at_least=1
    )
    sink_tokens: int = setting(4, "sink_window: first tokens that all later ones see", "tokens", at_least=1)
    block_tokens: int | None = setting(
        None, "block masks: tokens per block; null: 128, or what blocks_file says", "tokens", at_least=1
    )
    block_stride: int = setting(8, "strided: every block_stride-th block is seen", "blocks", at_least=1)
    local_blocks: int = setting(2, "strided: nearest blocks seen, the own included", "blocks", at_least=1)
    vertical_blocks: tuple[int, ...] = setting(
        (0,), "vertical_slash: numbers of the blocks that all later ones see", "blocks"
    )
    slash_blocks: tuple[int, ...] = setting(
        (0, 1), "vertical_slash: distances at which a block is seen, 0 its own", "blocks"
    )
    blocks_file: str | None = setting(
        None, "blocks: file of [n, 2] (query block, key block) pairs: .npy, .npz or .json"
    )
    kernel: KernelName = setting("auto", "what computes one tile; auto: the fastest that is legal")
    check_plans: bool = setting(False, "for debugging: ranks compare both ends of all messages before every step")


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept for the backward pass, where it lies, and the memory that there is."""

    activation_checkpoint: CheckpointKind | Literal["auto"] = setting(
        "full",
        "what a layer keeps for backward; none: everything, full: its input, attn_out: that and attention's "
        "results, seq_fraction: that and attention's results of the last part of the sequence, attn_out_every: "
        "attention's results, and the input of every few layers, auto: the fastest that fits",
    )
    checkpoint_layers: tuple[CheckpointKind, ...] = setting(
        (), "policies of the layers in turn, repeated; empty: activation_checkpoint for all"
    )
    saved_fraction: float = setting(
        0.5,
        "seq_fraction: share of the sequence, from its end, whose attention is not computed again",
        at_least=0,
        at_most=1,
    )
    every_layers: int = setting(4, "attn_out_every: layers per kept layer input", "layers", at_least=1)
    activation_store: Store | None = setting(
        None, "where what is kept lies; null: in host memory under attention.chunk_store=host, else device"
    )
    host_layers: int | None = setting(
        None,
        "activation_store=host: so many layers, the first ones, keep there and the others on the device; null: all",
        "layers",
        at_least=1,
    )
    tile_tokens: int | None = setting(
        None,
        "projections and MLP run on so many of a rank's tokens at a time; "
        "null: attention.chunk_tokens, model.hidden_size under attention=alst, otherwise all",
        "tokens",
        at_least=1,
    )
    optimizer_store: Store = setting(
        "device", "where master weights, gradients and moments lie; host: and are updated there"
    )
    optimizer_in_backward: bool = setting(
        False, "update a layer as soon as its gradient is complete, which then is freed (no clipping)"
    )
    moments_dtype: MomentsDtype = setting("float32", "number format of AdamW's moments; int8 needs torchao")
    device_bytes: int | None = setting(None, "memory of one device to plan with; null: all it has", "bytes", at_least=1)
    host_bytes: int | None = setting(
        None, "host memory of one node to plan with, for all its ranks; null: all it has", "bytes", at_least=1
    )


@dataclass(frozen=True)
class LossConfig:
    """How logits become a loss."""

    chunk_tokens: int = setting(2048, "rows of logits alive at once", "tokens", at_least=1)
    z_loss: float = setting(0.0, "weight of the squared log of the partition function", at_least=0)


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks are divided: world_size = dp_replicate_size * dp_shard_size * cp_size * tp_size."""

    cp_size: int | None = setting(
        None, "ranks that share one sequence; null: all that data parallelism leaves", "ranks", at_least=1
    )
    dp_shard_size: int = setting(
        1, "ranks that share parameters and read different sequences (FSDP)", "ranks", at_least=1
    )
    tp_size: int = setting(1, "ranks that split every matrix, and the rows between layers", "ranks", at_least=1)
    dp_replicate_size: int = setting(1, "copies of the sharded model (HSDP)", "copies", at_least=1)
    comm_sms: int | None = setting(
        None, "of a GPU, which kernels leave to attention's messages", "multiprocessors", at_least=1
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = setting(3e-4, "highest learning rate", above=0)
    schedule: Literal["cosine", "constant", "wsd"] = setting(
        "cosine", "course of the learning rate after warm-up; wsd: flat, then a final decay"
    )
    warmup_steps: int = setting(0, "linear rise from 0 to learning_rate", "steps", at_least=0)
    decay_steps: int | None = setting(
        None, "wsd: length of the final decay; null: a tenth of all steps", "steps", at_least=1
    )
    min_learning_rate_ratio: float = setting(0.1, "last learning rate as a share of the highest", at_least=0, at_most=1)
    beta1: float = setting(0.9, "decay of the gradient's mean", at_least=0, below=1)
    beta2: float = setting(0.95, "decay of the squared gradient's mean", at_least=0, below=1)
    epsilon: float = setting(1e-8, "added to the denominator", above=0)
    weight_decay: float = setting(0.1, "decoupled; not on norms", at_least=0)
    max_grad_norm: float | None = setting(1.0, "clip the global gradient norm to this; null: never", above=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the training state is saved, where, and what is kept. Off unless one of the first three is set."""

    at_end: bool = setting(False, "save when the run ends, or is asked to stop")
    every_steps: int | None = setting(None, "steps between checkpoints", "steps", at_least=1)
    every_minutes: float | None = setting(None, "time between checkpoints", "minutes", above=0)
    keep_last: int = setting(2, "newest checkpoints that are kept", "checkpoints", at_least=2)
    in_background: bool = setting(
        False, "training goes on while a copy in host memory is written: 12 bytes per parameter, sharded"
    )
    stop_grace_s: float = setting(
        60.0, "what a run that is asked to stop may take to end its step and save", "seconds", at_least=12
    )
    folder: str | None = setting(
        None, "where checkpoints lie, by run id; null: in cluster.shared_folder, else in the run folder"
    )
    resume_from: str | None = setting(
        None,
        "RUN, or the path of a run or of one of its checkpoints, to go on from, whatever its ranks and method were",
    )

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are written: always at the end, too, and when the run is asked to stop."""
        return self.at_end or self.is_periodic

    @property
    def is_periodic(self) -> bool:
        """Whether they are written before the end."""
        return self.every_steps is not None or self.every_minutes is not None


@dataclass(frozen=True)
class GuardConfig:
    """What happens to a step whose loss or gradient is no number, or whose loss leaps."""

    on_nonfinite: Reaction = setting(
        "stop",
        "loss or gradient norm is NaN or infinite; stop: the run ends, skip: the weights stay as they were, "
        "rewind: back to the newest checkpoint, and on with the data after this step's",
    )
    on_spike: Reaction = setting("skip", "the loss is far above those before it; as on_nonfinite")
    spike_deviations: float | None = setting(
        None, "how many deviations above the recent median a loss is a spike; null: none is", above=0
    )

    @property
    def reactions(self) -> frozenset[Reaction]:
        """All that may happen."""
        return frozenset({self.on_nonfinite, *(() if self.spike_deviations is None else (self.on_spike,))})

    @property
    def may_drop(self) -> bool:
        """Whether a step is judged before its weights are updated."""
        return self.reactions != {"stop"} or self.spike_deviations is not None


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    seq_len: int = setting(4096, "length of one sequence, over all its ranks", "tokens", at_least=1)
    steps: int = setting(100, "optimizer steps", "steps", at_least=1)
    micro_batch_size: int = setting(1, "sequences per data-parallel rank and micro-step", "sequences", at_least=1)
    grad_accum_steps: int = setting(1, "micro-steps per optimizer step", "micro-steps", at_least=1)
    compute_dtype: Dtype = setting("bfloat16", "number format of matrix products")
    deterministic: bool = setting(False, "equal runs give equal bits, on a GPU too; kernels that cannot are not used")
    dropout: float = setting(
        0.0,
        "share of what attention and the MLP add to the residual stream that is dropped in training",
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
        "depths, evenly from the start of the sequence to its end, at which a sentence is hidden and asked for; "
        "0: none",
        "depths",
        at_least=0,
    )
    eval_needle_samples: int = setting(4, "texts in which a sentence is hidden at every depth", "texts", at_least=1)
    evaluate_only: bool = setting(
        False, "evaluate weights of checkpoint.resume_from or model.init_from, and train nothing"
    )
    compile: bool = setting(False, "torch.compile every layer")
    tensorboard: bool = setting(False, "also write TensorBoard events into the run folder")
    profile: str | None = setting(None, "START:STOP, the steps that torch.profiler traces into RUN/profile/", "steps")
    peak_flops_per_device: float | None = setting(
        None, "what MFU is measured against; null: by device name, measured on CPU", "FLOP/s", above=0
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()


# Of text that people write, and of programs; not of data, which has formats of its own.
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml", ".txt.gz"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".js"),
    *(".jsx", ".ts", ".tsx", ".rb", ".pl", ".php", ".swift", ".lua", ".jl", ".r", ".R", ".hs", ".ml", ".sql", ".sh"),
    *(".css", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
)


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    format: Literal["stdlib", "text", "jsonl", "parquet", "shards"] = setting(
        "stdlib", "kind of files; stdlib: the source of Python's own library, found everywhere"
    )
    paths: tuple[str, ...] = setting((), "files, folders or globs; empty only for stdlib")
    text_suffixes: tuple[str, ...] = setting(
        (),
        "how files of a folder end that data.format=text reads; empty: as text and programs do (.txt, .md, .py, ...)",
    )
    on_bad_row: Literal["refuse", "skip"] = setting(
        "refuse", "a row (or a file of text) cannot be read; skip: leave it out and count it"
    )
    text_field: str = setting("text", "key (JSONL) or column (parquet) that holds the text")
    prompt_field: str | None = setting(
        None, "key (JSONL) of what comes before the text: read, but not learned; null: all text is learned"
    )
    messages_field: str | None = setting(
        None, "key (JSONL) of conversations: lists of {role, content}, of which the assistant's are learned"
    )
    chat_template: str | None = setting(
        None, 'what renders conversations: "chatml" or a .jinja file; null: the one beside the tokenizer'
    )
    tokenizer: str = setting(
        "bytes", '"bytes", "bpe" (trained on the corpus) or the path of a tokenizer.json or of its folder'
    )
    bos: Bos = setting("auto", "first token of documents; auto: as the template in tokenizer.json has it, off: none")
    bpe_vocab_size: int = setting(4096, "size of a trained BPE vocabulary", "tokens", at_least=257)
    prepared_dir: str | None = setting(None, "folder of token shards; null: one in the cache, named by content")
    validation_fraction: float = setting(0.01, "share of the corpus kept for validation", above=0, below=1)
    echo_tokens: int | None = setting(
        None,
        "read every so many tokens of this corpus twice in a row: what a toy needs a long context for; null: once",
        "tokens",
        at_least=1,
    )
    mix_paths: tuple[str, ...] = setting(
        (), "prepared folders that training samples are taken from, too (data.mix_weights)"
    )
    mix_weights: tuple[float, ...] = setting(
        (), "shares of this corpus and of each of data.mix_paths among the samples"
    )
    length_buckets: tuple[int, ...] = setting(
        (), "lengths of documents at which classes of samples are divided, ascending", "tokens"
    )
    length_weights: tuple[float, ...] = setting(
        (), "shares of the classes of data.length_buckets among the samples, one more; sum 1"
    )
    max_bytes: int | None = setting(None, "stop reading the corpus after so much text", "bytes", at_least=1)

    @property
    def resolved_text_suffixes(self) -> tuple[str, ...]:
        """The endings that are read: those given, else TEXT_SUFFIXES."""
        return self.text_suffixes or TEXT_SUFFIXES

    @property
    def tokenizer_path(self) -> Path | None:
        """The folder of a tokenizer, or the tokenizer.json in it; None for `bytes` and `bpe`."""
        return None if self.tokenizer in ("bytes", "bpe") else Path(self.tokenizer).expanduser()


@dataclass(frozen=True)
class RunConfig:
    """Everything a run needs; written to RUN/config.yaml and read by every rank."""

    exp: str = setting("tiny", "name of the experiment: the folder of its runs")
    seed: int = setting(0, "seed of initial weights and of the order of data", at_least=0)
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
    """The configuration that these plain values spell; absent fields take their defaults.

    Raises ConfigError with every unknown key, wrong type and illegal choice at once. Does not check fields
    against one another or against files: that is `engine.resolve.rules.check_config`.
    """
    config, problems = read_dataclass(RunConfig, values)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config


def load_config(path: str | Path) -> RunConfig:
    """The configuration in a YAML file, such as RUN/config.yaml. Raises ConfigError, naming the file."""
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
    """The configuration as YAML text with every field present; `load_config` reads it back unchanged."""
    plain = to_plain(config)
    text = yaml.dump(plain, Dumper=ConfigDumper, sort_keys=False, allow_unicode=True)
    if all(line.isprintable() for line in text.split("\n")):
        return text
    # PyYAML writes Unicode's own line ends (U+0085) as they are and reads them back as another character.
    return yaml.dump(plain, Dumper=ConfigDumper, sort_keys=False)
