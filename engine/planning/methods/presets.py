"""Presets: every published method as a named point on the axes of distributed attention.

Standard library only, so that the command line checks legality without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from engine.planning.checkpoint_policy import checkpoint_kinds, recompute_cut
from engine.planning.program.ops import Kind, TokenBytes
from engine.planning.topology import Grid, Topology, divisors, padded_length

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
    """A legal, fully resolved method: what the planners need besides mask and shapes."""

    preset: PresetName = "single"
    layout: LayoutName = "contiguous"
    ring_inner_size: int = 1
    ring_outer_size: int = 1
    backward_circulates: Circulated = "kv"
    gradient_wire_dtype: Dtype = "float32"
    reason: str = ""  # why this operand circulates in backward
    head_parallel_size: int = 1
    placement: Placement = "head_first"
    kv_transport: KvTransport = "p2p"
    backward_order: BackwardOrder = "same"
    kv_replicated: bool = False  # more ranks divide the heads than there are kv heads
    deferred_local_tiles: int = 0  # of the backward ring, until the last gradients of other nodes come home
    chunk_tokens: int | None = None
    chunk_store: Store = "device"
    prefetch_chunks: int = 1
    split_at: int = 0  # split_zigzag: where its second zigzag begins, which is where recomputation of attention ends

    @property
    def grid(self) -> Grid:
        """Places of the ranks that share one sequence."""
        return Grid(self.head_parallel_size, self.ring_inner_size, self.ring_outer_size, self.placement)

    @property
    def cp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.grid.size


def leaves_direction_free(attention: AttentionConfig) -> bool:
    """Whether what circulates in backward is to be chosen by predicted time."""
    return (attention.backward_circulates or PRESETS[attention.preset].backward_circulates) == "auto"


def circulation_reason(config: RunConfig, circulates: Circulated, deferred: int = 0) -> str:
    """What circulates in backward, in words, with the bytes that decide where links do."""
    model, train = local_heads(config.model, config.parallel.tp_size), config.train
    wire = BYTES_OF[config.attention.gradient_wire_dtype or "float32"]
    row = TokenBytes(
        *(model.num_heads, model.num_kv_heads, model.head_dim, model.head_dim),
        element_bytes=BYTES_OF[train.compute_dtype],
        wire_gradient_bytes=wire,
    )
    kv, q = row.of(Kind.KV) + row.of(Kind.DKV_WIRE), row.of(Kind.Q_DOUT_STATS) + row.of(Kind.DQ_WIRE)
    group = model.num_heads // model.num_kv_heads
    heads = "multi-head attention" if group == 1 else f"grouped-query attention with {group} query heads per kv head"
    tiles = f", {deferred} local tiles deferred" if deferred else ""
    return f"{circulates} circulates{tiles}; {heads}, per token and hop: kv {kv} B, q {q} B"


def legal_attention(config: RunConfig, topology: Topology) -> AttentionMethod:
    """The configured preset with its overrides as a legal method on the ranks of `topology`, which share one sequence;
    what the preset leaves free is the plainest that there is (`resolve_attention` chooses).

    Raises ConfigError with every violated rule and the nearest legal degrees.
    """
    attention, train = config.attention, config.train
    model = local_heads(config.model, config.parallel.tp_size)
    preset = PRESETS[attention.preset]
    degrees = _degrees(attention, preset, topology, model)
    problems = [*_degree_problems(attention, preset, degrees, topology.size, model), *_axis_problems(attention, preset)]
    if train.seq_len < topology.size:
        problems.append(
            f"train.seq_len: got {train.seq_len} tokens for {topology.size} ranks; every rank needs at least one"
        )
    if problems:
        raise ConfigError(problems)
    gradient_dtype: Dtype = attention.gradient_wire_dtype or "float32"
    chunked = preset.chunked or attention.chunk_tokens is not None
    requested = attention.backward_circulates or preset.backward_circulates
    circulates: Circulated = "q" if requested == "q" else "kv"
    replicas = max(1, degrees.heads // model.num_kv_heads)
    split_at = _recompute_border(config, degrees)
    layout = attention.layout or _default_layout(config, preset, split_at)
    return AttentionMethod(
        preset=attention.preset,
        layout=layout,
        ring_inner_size=degrees.inner,
        ring_outer_size=degrees.outer,
        backward_circulates=circulates,
        gradient_wire_dtype=gradient_dtype,
        reason=f"as configured: {circulation_reason(config, circulates)}",
        head_parallel_size=degrees.heads,
        placement=attention.placement or "head_first",
        kv_transport=attention.kv_transport or preset.kv_transport,
        backward_order=attention.backward_order or preset.backward_order,
        kv_replicated=replicas > 1,
        chunk_tokens=(attention.chunk_tokens or -(-DEFAULT_CHUNK_TOKENS // degrees.heads)) if chunked else None,
        chunk_store=attention.chunk_store or ("host" if chunked else "device"),
        prefetch_chunks=1 if attention.prefetch_chunks is None else attention.prefetch_chunks,
        split_at=split_at if layout == "split_zigzag" else 0,
    )


def _default_layout(config: RunConfig, preset: Preset, split_at: int) -> LayoutName:
    """The preset's; in place of zigzag contiguous where every layer has a window, since only neighbours then see each
    other's keys, split_zigzag where attention of a first part of the sequence is computed again, and balanced where
    documents are apart: their lengths, not positions, then say who has much to do. Its blocks may differ by a few
    rows, which tensor parallel ranks cannot divide.
    """
    attention = config.attention
    if preset.layout != "zigzag":
        return preset.layout
    if set(attention.mask_layers or (attention.mask,)) == {"window"}:
        return "contiguous"
    if split_at:
        return "split_zigzag"
    return "balanced" if attention.documents and config.parallel.tp_size == 1 else "zigzag"


def _recompute_border(config: RunConfig, degrees: Grid) -> int:
    """Where the part of the sequence ends whose attention is computed again in backward; 0: there is no border."""
    if "seq_fraction" not in checkpoint_kinds(config.memory):
        return 0
    cut = recompute_cut("seq_fraction", config, degrees.size)
    tp_size = config.parallel.tp_size
    assert cut is not None
    return cut if cut < padded_length(config.train.seq_len, degrees.size, tp_size) else 0


def warnings_of(method: AttentionMethod, topology: Topology) -> list[str]:
    """What is legal and probably not meant."""
    found = []
    width = method.ring_inner_size * (method.head_parallel_size if method.placement != "context_first" else 1)
    if topology.nodes > 1 and method.ring_outer_size > 1 and topology.local_ranks % width:
        found.append(
            f"attention: inner ring {method.ring_inner_size} with {method.head_parallel_size} ranks per head group "
            f"does not divide the {topology.local_ranks} ranks of a node, so inner hops cross nodes"
        )
    return found


def local_heads(model: ModelConfig, tp_size: int) -> ModelConfig:
    """The heads that one tensor-parallel rank has."""
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
    if tile_tokens is not None and config.parallel.tp_size > 1:
        raise ConfigError(
            f"memory.tile_tokens, attention.chunk_tokens: layers run {tile_tokens} rows at a time, but "
            f"parallel.tp_size={config.parallel.tp_size} gathers the rows of several ranks inside a layer; "
            "set parallel.tp_size=1, or leave both null"
        )
    return tile_tokens


def legal_degrees(size: int, model: ModelConfig) -> Iterator[Grid]:
    """Every (h, w, W) whose product is `size` and whose h divides the heads."""
    for heads in divisors(size):
        if heads_problem(heads, model) is None:
            for inner in divisors(size // heads):
                yield Grid(heads, inner, size // heads // inner)


def heads_problem(heads: int, model: ModelConfig) -> str | None:
    """Why the heads of the model cannot be divided so; None when they can."""
    if model.num_heads % heads:
        return f"{heads} ranks cannot divide {model.num_heads} query heads evenly"
    if model.num_kv_heads % heads and heads % model.num_kv_heads:
        return (
            f"{heads} ranks neither divide the {model.num_kv_heads} kv heads evenly nor hold equally many copies of "
            "each"
        )
    return None


def _degrees(attention: AttentionConfig, preset: Preset, topology: Topology, model: ModelConfig) -> Grid:
    """What is configured; what is not follows the preset's shape, or fills up the ranks."""
    size = topology.size
    heads, inner, outer = attention.head_parallel_size, attention.ring_inner_size, attention.ring_outer_size
    if heads is None and inner is not None and outer is not None and "heads" in preset.shape:
        heads = max(1, size // (inner * outer))
    if heads is None:
        heads = _default_heads(preset.shape, topology, model)
    if preset.shape == "alone" and inner is None and outer is None:
        return Grid(heads, 1, 1)
    ring_size = max(1, size // heads)
    if inner is None and outer is None:
        inner = _default_inner(preset.shape, topology, heads, ring_size)
        return Grid(heads, inner, max(1, ring_size // inner))
    if inner is None:
        assert outer is not None
        return Grid(heads, max(1, ring_size // outer), outer)
    return Grid(heads, inner, outer if outer is not None else max(1, ring_size // inner))


def _default_heads(shape: Shape, topology: Topology, model: ModelConfig) -> int:
    if shape == "heads":
        return topology.size
    if shape in ("heads_and_ring", "heads_and_double_ring"):
        wanted = topology.local_ranks
        fitting = [h for h in divisors(wanted) if model.num_heads % h == 0 and model.num_kv_heads % h == 0]
        return max(fitting)
    return 1


def _default_inner(shape: Shape, topology: Topology, heads: int, ring_size: int) -> int:
    """Ring members inside a node, when head groups fill nodes evenly; else one flat ring."""
    if shape not in ("double_ring", "heads_and_double_ring") or topology.local_ranks % heads:
        return ring_size
    return topology.local_ranks // heads


def _degree_problems(
    attention: AttentionConfig, preset: Preset, degrees: Grid, size: int, model: ModelConfig
) -> list[str]:
    if preset.shape == "alone" and degrees == Grid(1, 1, 1) and size > 1:
        other = "tp_size" if attention.preset == "megatron_tp" else "dp_shard_size"
        return [
            f"attention={attention.preset} holds the whole sequence on one rank, but {size} ranks share it; "
            f"set parallel.cp_size=1 parallel.{other}={size}, or choose attention=burst"
        ]
    problems = []
    if degrees.size != size:
        problems.append(
            f"attention: head_parallel_size {degrees.heads} x ring_inner_size {degrees.inner} x ring_outer_size "
            f"{degrees.outer} = {degrees.size} ranks, but {size} ranks share a sequence"
        )
    wrong_heads = heads_problem(degrees.heads, model)
    if wrong_heads:
        problems.append(f"attention.head_parallel_size: {wrong_heads}")
    if problems:
        problems[-1] += f"; nearest legal head x inner x outer: {_nearest(degrees, size, model)}"
    return problems


def _nearest(degrees: Grid, size: int, model: ModelConfig) -> str:
    """The legal degrees most like the given ones, at most four."""

    def distance(other: Grid) -> tuple[int, int]:
        apart = [other.heads - degrees.heads, other.inner - degrees.inner, other.outer - degrees.outer]
        return sum(map(bool, apart)), sum(map(abs, apart))

    return ", ".join(str(found) for found in sorted(legal_degrees(size, model), key=distance)[:4])


def _axis_problems(attention: AttentionConfig, preset: Preset) -> list[str]:
    """Rules between the axes that hold whatever the number of ranks."""
    problems = []
    chunked = preset.chunked or attention.chunk_tokens is not None
    layout = attention.layout or preset.layout
    transport = attention.kv_transport or preset.kv_transport
    order = attention.backward_order or preset.backward_order
    circulates = attention.backward_circulates or preset.backward_circulates
    if layout == "chunk_cyclic" and not chunked:
        problems.append("attention.layout=chunk_cyclic orders tokens by chunks; set attention.chunk_tokens")
    for name, value in (("chunk_store", attention.chunk_store), ("prefetch_chunks", attention.prefetch_chunks)):
        if value is not None and not chunked:
            problems.append(f"attention.{name}={value} speaks of chunks; set attention.chunk_tokens, or leave it null")
    if chunked:
        problems += _chunk_problems(attention, transport, order)
    if circulates == "q" and transport == "all_gather":
        problems.append("attention.kv_transport=all_gather circulates nothing; q cannot: leave backward_circulates kv")
    if order == "reversed" and transport == "all_gather":
        problems.append("attention.backward_order=reversed turns a ring around; kv_transport=all_gather has none")
    if order == "reversed" and circulates in ("q", "auto"):
        problems.append("attention.backward_order=reversed is for K,V; set attention.backward_circulates=kv")
    return problems


def _chunk_problems(attention: AttentionConfig, transport: KvTransport, order: BackwardOrder) -> list[str]:
    """Of rings, chunks have the plain one only: chunks of keys travel one after another."""
    refused = {
        "kv_transport=all_gather": transport == "all_gather",
        "backward_order=reversed": order == "reversed",
        "backward_circulates=q": attention.backward_circulates == "q",
    }
    return [
        f"attention.{name} and chunks exclude each other: chunks of keys and values travel a plain ring; leave it "
        "null, or attention.chunk_tokens"
        for name, given in refused.items()
        if given
    ]


# Points of the space that differ from another one only in what they keep or how they cut layers.
NOT_COMPARED = frozenset({"single", "megatron_tp", "fpdt", "alst"})


def legal_methods(config: RunConfig, topology: Topology) -> list[tuple[AttentionConfig, AttentionMethod]]:
    """What `auto` chooses from, every method once; raises ConfigError with all rules violated when there is none."""
    found: dict[AttentionMethod, tuple[AttentionConfig, AttentionMethod]] = {}
    problems: list[str] = []
    for attention in _points(config, topology):
        try:
            method = legal_attention(replace(config, attention=attention), topology)
        except ConfigError as error:
            problems += error.problems
            continue
        found.setdefault(replace(method, preset="auto", reason=""), (attention, method))
    if not found:
        raise ConfigError(list(dict.fromkeys(problems)))
    return list(found.values())


def _points(config: RunConfig, topology: Topology) -> Iterator[AttentionConfig]:
    """Presets, what may circulate in them, and every 2D shape whose head groups and inner rings fill a node."""
    base = config.attention
    for name in PRESETS:
        if name not in NOT_COMPARED:
            yield replace(base, preset=name)
    model = local_heads(config.model, config.parallel.tp_size)
    for degrees in legal_degrees(topology.size, model):
        if degrees.heads > 1 and degrees.heads * degrees.inner == topology.local_ranks and degrees.outer > 1:
            shaped = replace(
                base,
                preset="loongtrain",
                head_parallel_size=degrees.heads,
                ring_inner_size=degrees.inner,
                ring_outer_size=degrees.outer,
            )
            yield replace(shaped, backward_circulates="kv")
            yield replace(shaped, backward_circulates="q")
