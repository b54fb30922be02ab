"""The sizes of one rank that every memory formula is made of. Standard library and torch-free planning only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.settings import RunConfig
from engine.planning.methods.grid import chunk_count
from engine.planning.methods.presets import BYTES_OF, AttentionMethod
from engine.planning.methods.tiling import tile_tokens_of
from engine.planning.sequence.lengths import padded_length
from engine.planning.time.flops import count_parameters, layer_vectors

LSE_BYTES = 4  # attention's log-sum-exp is fp32 in both compute dtypes
WIDE_BYTES = 4  # master weights, gradients, accumulators
# Gradients of FSDP units in host memory at once, updated there inside backward: used, waiting (2), on their way.
UNITS_ON_HOST = 4


@dataclass(frozen=True)
class RankShape:
    """Tokens, widths and parameters of one rank; the sequences of a micro-batch count as more tokens.

    rows            tokens T inside attention and MLP: those of the rank's cp group
    rows_between    tokens between the layers, T / tp
    tile_rows       tokens that projections and MLP work on at a time
    chunk_rows      tokens of one chunk of the attention pipeline; rows without one
    hidden          d
    ffn             inner width of the MLP, of this rank's slice
    heads, q_width  query heads H and H * D, of this rank's slice
    kv_width        K * D, of this rank's slice, with the copies that head parallelism makes
    layer_numbers   parameters of one layer, of this rank's slice, before they are sharded
    vocab           rows V of embedding and head, of this rank's slice
    shards          ranks z over which a parameter is divided: dp_shard x cp
    """

    rows: int
    rows_between: int
    tile_rows: int
    chunk_rows: int
    element_bytes: int
    hidden: int
    ffn: int
    heads: int
    q_width: int
    kv_width: int
    layer_numbers: int
    vocab: int
    shards: int

    @property
    def vocab_numbers(self) -> int:
        """Parameters of the embedding, or of the head, of this rank's slice."""
        return self.vocab * self.hidden

    @property
    def hidden_bytes(self) -> int:
        """One tensor of hidden states between the layers, [T / tp, d]."""
        return self.rows_between * self.hidden * self.element_bytes

    @property
    def qkv_bytes(self) -> int:
        """q, k and v of one layer."""
        return self.rows * (self.q_width + 2 * self.kv_width) * self.element_bytes

    @property
    def result_bytes(self) -> int:
        """out and lse of one layer's attention: 2 T H D + 4 T H in bf16."""
        return self.rows * (self.q_width * self.element_bytes + LSE_BYTES * self.heads)


def rank_shape(config: RunConfig, method: AttentionMethod) -> RankShape:
    """The sizes of a rank of this run. Raises ConfigError where the layers cannot be tiled as configured."""
    model, parallel, train = config.model, config.parallel, config.train
    tp_size = parallel.tp_size
    padded = padded_length(train.seq_len, method.cp_size, tp_size)
    rows = -(-padded // method.cp_size) * train.micro_batch_size
    tile_tokens = tile_tokens_of(config, method)
    replicas = max(1, method.head_parallel_size * tp_size // model.num_kv_heads)
    counted = count_parameters(model)
    layer_numbers = counted.layer_matmuls // model.num_layers // tp_size + layer_vectors(model, tp_size)
    return RankShape(
        rows=rows,
        rows_between=rows // tp_size,
        tile_rows=min(rows, tile_tokens * train.micro_batch_size) if tile_tokens else rows,
        chunk_rows=-(-rows // chunk_count(method, padded)),
        element_bytes=BYTES_OF[train.compute_dtype],
        hidden=model.hidden_size,
        ffn=model.ffn_hidden_size // tp_size,
        heads=model.num_heads // tp_size,
        q_width=model.num_heads * model.head_dim // tp_size,
        kv_width=model.num_kv_heads * model.head_dim * replicas // tp_size,
        layer_numbers=layer_numbers,
        vocab=model.vocab_size // tp_size,
        shards=parallel.dp_shard_size * method.cp_size,
    )
