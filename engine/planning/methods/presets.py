"""Presets: every published method as a named point on the axes of distributed attention.

Standard library only, so that the command line checks legality without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.config.errors import ConfigError
from engine.config.settings import (
    AttentionConfig,
    BackwardOrder,
    Dtype,
    KvTransport,
    LayoutName,
    ModelConfig,
    Placement,
    PresetName,
    RunConfig,
    Store,
)
from engine.planning.topology import Grid, Topology

BYTES_OF: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
# Over all ranks of a head group. Hides 16-bit transfers over PCIe 5 behind the kernels of an H100; about 12K suffice.
DEFAULT_CHUNK_TOKENS = 65536

Circulated = Literal["kv", "q"]
Shape = Literal["alone", "ring", "double_ring", "heads", "heads_and_ring", "heads_and_double_ring"]


@dataclass(frozen=True)
class Preset:
    """A named point; how many ranks divide heads, inner and outer ring follows from `shape` and the topology.

    alone                   one rank holds the sequence
    ring                    one ring over all ranks
    double_ring             ring inside nodes, ring between nodes
    heads                   all ranks divide the heads
    heads_and_ring          heads inside a node as far as they go, one ring over the rest
    heads_and_double_ring   the same with a double ring
    """

    layout: LayoutName
    shape: Shape
    backward_circulates: Literal["kv", "q", "auto"] = "kv"
    backward_order: BackwardOrder = "same"
    kv_transport: KvTransport = "p2p"
    defers_local_tiles: bool = False  # local tiles may wait for the last gradients of other nodes
    chunked: bool = False


PRESETS: dict[PresetName, Preset] = {
    "single": Preset("contiguous", "alone"),
    "ring": Preset("zigzag", "ring"),
    "striped": Preset("striped", "ring"),
    "burst": Preset("zigzag", "double_ring", "auto", defers_local_tiles=True),
    "burst_ulysses": Preset("zigzag", "heads_and_ring", "auto", defers_local_tiles=True),
    "ulysses": Preset("contiguous", "heads"),
    "loongtrain": Preset("zigzag", "heads_and_double_ring"),
    "usp": Preset("zigzag", "heads_and_ring"),
    "megatron_cp": Preset("zigzag", "ring", backward_order="reversed"),
    "megatron_allgather": Preset("zigzag", "ring", kv_transport="all_gather"),
    "megatron_hierarchical": Preset("zigzag", "heads_and_ring", backward_order="reversed"),
    "megatron_tp": Preset("contiguous", "alone"),  # every rank has some heads of all rows
    "fpdt": Preset("chunk_cyclic", "heads", chunked=True),
    "alst": Preset("contiguous", "heads"),
}


@dataclass(frozen=True)
class AttentionMethod:
    """A legal, fully resolved method: the input of the planners besides mask and shapes."""

    preset: PresetName = "single"
    layout: LayoutName = "contiguous"
    ring_inner_size: int = 1
    ring_outer_size: int = 1
    backward_circulates: Circulated = "kv"
    gradient_wire_dtype: Dtype = "float32"
    head_parallel_size: int = 1
    placement: Placement = "head_first"
    kv_transport: KvTransport = "p2p"
    backward_order: BackwardOrder = "same"
    kv_replicated: bool = False  # more ranks divide the heads than there are kv heads
    deferred_local_tiles: int = (
        0  # local tiles that the backward ring computes while the last gradients arrive from other nodes
    )
    chunk_tokens: int | None = None
    chunk_store: Store = "device"
    prefetch_chunks: int = 1
    split_at: int = 0  # split_zigzag: first position of its second zigzag; attention before it is recomputed

    @property
    def grid(self) -> Grid:
        """The grid of the ranks that share one sequence."""
        return Grid(self.head_parallel_size, self.ring_inner_size, self.ring_outer_size, self.placement)

    @property
    def cp_size(self) -> int:
        """The number of ranks that share one sequence."""
        return self.grid.size


def leaves_direction_free(attention: AttentionConfig) -> bool:
    """Return whether the moving operand of backward is selected by predicted time."""
    return (attention.backward_circulates or PRESETS[attention.preset].backward_circulates) == "auto"


def warnings_of(method: AttentionMethod, topology: Topology) -> list[str]:
    """Return legal settings that are probably a mistake, one sentence each."""
    found = []
    width = method.ring_inner_size * (method.head_parallel_size if method.placement != "context_first" else 1)
    if topology.nodes > 1 and method.ring_outer_size > 1 and topology.local_ranks % width:
        found.append(
            f"attention: inner ring {method.ring_inner_size} with {method.head_parallel_size} ranks per head group "
            f"does not divide the {topology.local_ranks} ranks of a node, so inner hops cross nodes"
        )
    return found


def local_heads(model: ModelConfig, tp_size: int) -> ModelConfig:
    """Return the model with the heads of one tensor parallel rank."""
    if tp_size <= 1 or model.num_heads % tp_size or model.num_kv_heads % tp_size:
        return model
    return replace(model, num_heads=model.num_heads // tp_size, num_kv_heads=model.num_kv_heads // tp_size)


def tile_tokens_of(config: RunConfig, method: AttentionMethod) -> int | None:
    """Rows at a time that the layers of a run work on (`engine.activations.checkpointed`); None: all. Raises
    ConfigError where they cannot.
    """
    tile_tokens = config.memory.tile_tokens or method.chunk_tokens
    if tile_tokens is None and method.preset == "alst":
        tile_tokens = config.model.hidden_size  # a tile of the MLP is then about as large as one of its matrices
    if tile_tokens is not None and config.model.implementation == "hf":
        raise ConfigError(
            f"memory.tile_tokens, attention.chunk_tokens: layers run {tile_tokens} rows at a time, but those of "
            "model.implementation=hf run whole; leave both null, and choose another attention than fpdt or alst"
        )
    if tile_tokens is not None and config.parallel.tp_size > 1:
        raise ConfigError(
            f"memory.tile_tokens, attention.chunk_tokens: layers run {tile_tokens} rows at a time, but "
            f"parallel.tp_size={config.parallel.tp_size} gathers the rows of several ranks inside a layer; "
            "set parallel.tp_size=1, or leave both null"
        )
    return tile_tokens
