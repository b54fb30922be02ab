"""The run configuration: frozen dataclasses, every field documented, the unit in its name.

Standard library only: the command line and every rank import this module without torch.
YAML -> Hydra compose -> plain dict -> `RunConfig` (here) -> RUN/config.yaml -> every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
LayoutName = Literal["contiguous", "zigzag", "striped"]
PresetName = Literal["single", "ring", "striped", "burst"]
Circulates = Literal["kv", "q", "auto"]
KernelName = Literal["auto", "reference", "cpu_flash", "aten_flash", "aten_cudnn", "flash_attn"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-style decoder."""

    name: str = "tiny"
    vocab_size: int = 256
    hidden_size: int = 256
    ffn_hidden_size: int = 688
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02


@dataclass(frozen=True)
class AttentionConfig:
    """A point in the space of distributed attention methods; null means: what the preset says."""

    preset: PresetName = "single"
    layout: LayoutName | None = None
    ring_inner_size: int | None = None
    ring_outer_size: int | None = None
    backward_circulates: Circulates | None = None
    gradient_wire_dtype: Dtype | None = None
    mask: Literal["causal", "full"] = "causal"
    kernel: KernelName = "auto"


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept for the backward pass."""

    activation_checkpoint: Literal["none", "full"] = "full"


@dataclass(frozen=True)
class LossConfig:
    """How logits become a loss."""

    kind: Literal["fused", "plain"] = "fused"
    chunk_tokens: int = 2048
    z_loss: float = 0.0


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks are divided: world_size = dp_replicate_size * dp_shard_size * cp_size."""

    cp_size: int | None = None  # null: all ranks that data parallelism leaves
    dp_shard_size: int = 1
    dp_replicate_size: int = 1
    reshard_after_forward: bool = True


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = 3e-4
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None  # wsd: length of the final decay; null: a tenth of all steps
    min_learning_rate_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    seq_len: int = 4096
    steps: int = 100
    micro_batch_size: int = 1  # sequences per data-parallel rank and micro-step
    grad_accum_steps: int = 1
    compute_dtype: Dtype = "bfloat16"
    eval_interval_steps: int | None = None  # null: only at the end
    eval_batches: int = 4
    warmup_metric_steps: int = 3  # first steps left out of medians
    compile: bool = False
    tensorboard: bool = False
    profile: str | None = None  # "START:STOP": steps traced by torch.profiler into RUN/profile/
    peak_flops_per_device: float | None = None  # FLOP/s; null: table by device name, measured on CPU
    log_interval_steps: int = 1


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    format: Literal["stdlib", "text", "jsonl", "parquet", "shards"] = "stdlib"
    paths: tuple[str, ...] = ()  # files or folders or globs; empty only for stdlib
    text_field: str = "text"  # key (JSONL) or column (parquet) that holds the text
    tokenizer: str = "bytes"  # "bytes", "bpe" (trained on the corpus) or the path of a tokenizer.json
    bpe_vocab_size: int = 4096
    prepared_dir: str | None = None  # where shards lie; null: a folder in the cache named by content
    validation_fraction: float = 0.01
    max_bytes: int | None = None  # stop reading the corpus after so many bytes of text


@dataclass(frozen=True)
class ClusterConfig:
    """The machines: this machine only, for now."""

    name: str = "local"
    ranks_per_node: int | None = None  # null: one per GPU, or 1 without GPUs
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    threads_per_rank: int | None = None  # null: cores / local ranks, at least 1
    topology_nodes: int | None = None  # treat the ranks as lying on so many nodes; null: as they do


@dataclass(frozen=True)
class RunConfig:
    """Everything a run needs; written to RUN/config.yaml and read by every rank."""

    exp: str = "tiny"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
