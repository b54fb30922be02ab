"""What is measured, as values, and what each policy promises. Standard library and the configuration only."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.bench.spec import RankSetup, Rounds, read_attention, split_point
from engine.config.errors import ConfigError
from engine.config.schema import read_dataclass
from engine.config.settings import Dtype, LossConfig, MemoryConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from engine.planning.checkpoint_policy import layer_policies
from engine.predict.flops import attention_pairs, count_parameters, forward_flops
from engine.resolve.legality import check_run

LSE_BYTES = 4  # attention's log-sum-exp is fp32 whatever the compute dtype


@dataclass(frozen=True)
class MemoryCell:
    """Policies of one model at one length, whose steps one group of ranks runs in turn.

    `policies` are points, NAME[:FIELD=VALUE]...: activation_checkpoint, and fields of the configuration group `memory`,
    as in seq_fraction:saved_fraction=0.25. `preset` is a point of attention.
    """

    policies: tuple[str, ...]
    seq_len: int
    model: ModelConfig
    preset: str = "burst"
    dtype: Dtype = "bfloat16"
    loss_chunk_tokens: int = 1024
    setup: RankSetup = field(default_factory=lambda: RankSetup(2))
    rounds: Rounds = field(default_factory=lambda: Rounds(5))

    def run_config(self, policy: str) -> RunConfig:
        """The configuration of a policy in this cell, checked by every rule; ConfigError with all broken ones."""
        config = RunConfig(
            model=self.model,
            attention=read_attention(self.preset, "causal"),
            memory=read_memory(policy),
            loss=LossConfig(chunk_tokens=self.loss_chunk_tokens),
            optimizer=OptimizerConfig(schedule="constant"),
            train=TrainConfig(seq_len=self.seq_len, compute_dtype=self.dtype),
            cluster=self.setup.cluster,
        )
        check_run(config)
        return config

    def attention_share(self) -> float:
        """Share of attention in the FLOPs of a forward pass; backward doubles both parts alike."""
        whole = forward_flops(self.model, tokens=self.seq_len, pairs=attention_pairs("causal", self.seq_len))
        return 1.0 - 2 * count_parameters(self.model).matmul * self.seq_len / whole

    def attention_flops(self) -> int:
        """FLOPs of causal attention in one forward pass over all layers and ranks."""
        pairs = attention_pairs("causal", self.seq_len)
        return 4 * self.model.num_layers * self.model.num_heads * self.model.head_dim * pairs

    def promised_bytes(self, policy: str, local_tokens: int) -> int | None:
        """Bytes that all layers of a rank keep for backward, by the table of policies; None where one keeps everything.

        x is the layer's input, `results` attention's out and lse: full x, attn_out x + results, seq_fraction
        x + saved_fraction * results, attn_out_every results and every k-th x.
        """
        model, memory = self.model, read_memory(policy)
        item = 2 if self.dtype == "bfloat16" else 4
        x = local_tokens * model.hidden_size * item
        results = local_tokens * model.num_heads * (model.head_dim * item + LSE_BYTES)
        shares = {"full": 0.0, "seq_fraction": memory.saved_fraction, "attn_out": 1.0, "attn_out_every": 1.0}
        layers = layer_policies(memory, model.num_layers)
        if any(layer.kind == "none" for layer in layers):
            return None
        return round(sum(x * layer.keeps_input + results * shares[layer.kind] for layer in layers))


def read_memory(point: str) -> MemoryConfig:
    """The configuration group `memory` of a policy written as a point; raises ConfigError with every mistake."""
    policy, fields = split_point(point)
    config, problems = read_dataclass(MemoryConfig, {"activation_checkpoint": policy} | fields)
    if problems:
        raise ConfigError([f"policy {point}: {problem.text}" for problem in problems])
    assert isinstance(config, MemoryConfig)
    if config.activation_checkpoint == "auto":
        raise ConfigError(f"policy {point}: auto is a choice among policies; name the policy that it chose")
    return config
