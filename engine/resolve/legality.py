"""Check whether a configuration can run: rules between settings, ranks and methods, all reported together. No torch.

Checked when overrides are composed into a configuration, and again when the survey has found the number of ranks. Ranks
of a launch do not check again: they read the `ResolvedRun` of a legal configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from engine.config.errors import ConfigError
from engine.config.schema import Problem
from engine.config.settings import (
    AttentionConfig,
    BackwardOrder,
    Dtype,
    KvTransport,
    LayoutName,
    ModelConfig,
    RunConfig,
)
from engine.data.rules import file_rules
from engine.planning.checkpoint_policy import checkpoint_kinds, recompute_cut
from engine.planning.methods.presets import (
    DEFAULT_CHUNK_TOKENS,
    PRESETS,
    AttentionMethod,
    Circulated,
    Preset,
    Shape,
    local_heads,
    tile_tokens_of,
)
from engine.planning.topology import Grid, Topology, divisors, padded_length
from engine.predict.machine import find_device, find_machine, read_rates, unknown_device
from engine.resolve.degrees import known_cp_size, resolve_topology, sequence_topology, tensor_parallel_problems
from engine.resolve.rules import check_config, config_problems


def problems(config: RunConfig) -> list[Problem]:
    """Return one problem per violated rule, those between settings alone (`engine.resolve.rules`) first.

    Rules that need the number of ranks are skipped while it is unknown.
    """
    return config_problems(config, _RULES)


def check_run(config: RunConfig) -> None:
    """Raise ConfigError with one sentence per violated rule, unless a run of this configuration may start."""
    check_config(config, _RULES)


def _degrees(config: RunConfig) -> Iterator[Problem]:
    """Check that degrees multiply to the world size, nodes divide it, and tensor parallelism stays inside a node."""
    world_size, nodes, parallel = config.cluster.world_size, config.cluster.topology_groups, config.parallel
    sizes = {key: value for key, value in vars(parallel).items() if key.endswith("_size")}
    if world_size is None or any(size is not None and size < 1 for size in (nodes, *sizes.values())):
        return
    try:
        resolve_topology(parallel, world_size, nodes)
    except ConfigError as error:
        keys = (*(f"parallel.{name}" for name in sizes), "cluster.topology_nodes", "cluster.ranks_per_node")
        for text in error.problems:
            yield Problem(keys, text)


def _tensor_parallel(config: RunConfig) -> Iterator[str]:
    """Check that every matrix can be sliced evenly."""
    if config.parallel.tp_size > 0:
        yield from tensor_parallel_problems(config.model, config.parallel.tp_size)


def _attention(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems that `legal_attention` raises, once the number of ranks that share a sequence is known."""
    cp_size = known_cp_size(config.parallel, config.cluster.world_size)
    attention = config.attention
    sizes = (attention.head_parallel_size, attention.ring_inner_size, attention.ring_outer_size, cp_size)
    if cp_size is None or any(size is not None and size < 1 for size in sizes) or not _has_legal_heads(config.model):
        return
    if attention.preset == "auto":  # resolved later, with a reason if no method is legal
        return
    try:
        tile_tokens_of(config, legal_attention(config, _topology(config, cp_size)))
    except ConfigError as error:
        keys = (f"attention.{item.name}" for item in fields(attention))
        for text in error.problems:
            yield Problem((*keys, "parallel.cp_size", "cluster.ranks_per_node"), text)


def _has_legal_heads(model: ModelConfig) -> bool:
    return model.num_kv_heads > 0 and model.num_heads > 0 and model.num_heads % model.num_kv_heads == 0


def _topology(config: RunConfig, cp_size: int) -> Topology:
    """Return the topology of the ranks of one sequence; a single node while the world size is unknown."""
    world_size, nodes = config.cluster.world_size, config.cluster.topology_groups
    try:
        degrees, topology = resolve_topology(config.parallel, world_size or 0, max(1, nodes))
        return degrees.cp_topology(topology)
    except ConfigError:  # reported by another rule
        return Topology(1, cp_size)


def _machine(config: RunConfig) -> Iterator[str]:
    """Check that the machine has a known name or a readable profile, with valid rates."""
    cluster = config.cluster
    name, rates = cluster.machine.name, cluster.machine.rates
    try:
        known = name == "auto" or find_device(name)
    except ConfigError as error:  # an unreadable profile
        yield from (f"cluster.machine.name: {text}" for text in error.problems)
        return
    if not known:
        yield f"cluster.machine.name: {unknown_device(name, 'auto')}"
        return
    try:
        find_machine("cpu" if name == "auto" else name, read_rates(rates))
    except ConfigError as error:
        yield from (f"cluster.machine.rates: {text}" for text in error.problems)


_RULES = (file_rules, _machine, _degrees, _tensor_parallel, _attention)


# --- methods ----------------------------------------------------------------------------------------------------------


def legal_attention(config: RunConfig, topology: Topology) -> AttentionMethod:
    """Return the configured preset with its overrides as a legal method.

    Settings that the preset leaves open get their simplest value; `resolve_attention` selects the fastest.

    Args:
        config: A configuration that names a preset.
        topology: The ranks that share one sequence.

    Raises:
        ConfigError: Lists every violated rule and the nearest legal degrees.
    """
    attention, train = config.attention, config.train
    model = local_heads(config.model, config.parallel.tp_size)
    preset = PRESETS[attention.preset]
    degrees = _grid(attention, preset, topology, model)
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
    if layout == "striped" and "no_attention" in attention.mask_layers:
        raise ConfigError(
            f"attention.layout: attention.preset={attention.preset} has striped, but the model's linear layers need "
            "runs of consecutive positions on a rank; set attention.layout=zigzag, or contiguous, balanced"
        )
    return AttentionMethod(
        preset=attention.preset,
        layout=layout,
        ring_inner_size=degrees.inner,
        ring_outer_size=degrees.outer,
        backward_circulates=circulates,
        gradient_wire_dtype=gradient_dtype,
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
    """Return the preset's layout, with a better one in place of zigzag.

    contiguous     every layer has a window: only neighbours see each other's keys
    split_zigzag   attention of a first part of the sequence is recomputed in backward
    balanced       documents are masked from each other: their lengths, not positions, determine the work of a rank. Its
                   blocks may differ by a few rows, which tensor parallel ranks cannot divide.
    """
    attention = config.attention
    if preset.layout != "zigzag":
        return preset.layout
    if set(attention.mask_layers or (attention.mask,)) - {"no_attention"} == {"window"}:
        return "contiguous"
    if split_at:
        return "split_zigzag"
    return "balanced" if attention.documents and config.parallel.tp_size == 1 else "zigzag"


def _recompute_border(config: RunConfig, degrees: Grid) -> int:
    """Return the position before which attention is recomputed in backward; 0: there is no border."""
    if "seq_fraction" not in checkpoint_kinds(config.memory):
        return 0
    cut = recompute_cut("seq_fraction", config, degrees.size)
    tp_size = config.parallel.tp_size
    assert cut is not None
    return cut if cut < padded_length(config.train.seq_len, degrees.size, tp_size) else 0


# Points of the search space that differ from another one only in saved tensors or in tiles of layers.
NOT_COMPARED = frozenset({"single", "megatron_tp", "fpdt", "alst"})


def legal_methods(config: RunConfig, topology: Topology) -> list[tuple[AttentionConfig, AttentionMethod]]:
    """Return the candidates of `auto`, each method once. Raises ConfigError with all rules if there is none."""
    found: dict[AttentionMethod, tuple[AttentionConfig, AttentionMethod]] = {}
    problems: list[str] = []
    for attention in _points(config, topology):
        try:
            method = legal_attention(replace(config, attention=attention), topology)
        except ConfigError as error:
            problems += error.problems
            continue
        found.setdefault(replace(method, preset="auto"), (attention, method))
    if not found:
        raise ConfigError(list(dict.fromkeys(problems)))
    return list(found.values())


def _points(config: RunConfig, topology: Topology) -> Iterator[AttentionConfig]:
    """Yield presets, their moving operands, and every 2D shape whose head groups and inner rings fill a node."""
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


def legal_degrees(size: int, model: ModelConfig) -> Iterator[Grid]:
    """Yield every grid (heads, inner, outer) whose product is `size` and whose head degree divides the heads."""
    for heads in divisors(size):
        if heads_problem(heads, model) is None:
            for inner in divisors(size // heads):
                yield Grid(heads, inner, size // heads // inner)


def heads_problem(heads: int, model: ModelConfig) -> str | None:
    """Return why the heads of the model cannot be divided over `heads` ranks; None if they can."""
    if model.num_heads % heads:
        return f"{heads} ranks cannot divide {model.num_heads} query heads evenly"
    if model.num_kv_heads % heads and heads % model.num_kv_heads:
        return (
            f"{heads} ranks neither divide the {model.num_kv_heads} kv heads evenly nor hold equally many copies of "
            "each"
        )
    return None


def _grid(attention: AttentionConfig, preset: Preset, topology: Topology, model: ModelConfig) -> Grid:
    """Return the configured degrees; open ones follow the preset's shape or take the remaining ranks."""
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
    """Return the ring members inside a node if head groups fill nodes evenly; else the size of one flat ring."""
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
    """Return the legal degrees closest to the given ones, at most four."""

    def distance(other: Grid) -> tuple[int, int]:
        apart = [other.heads - degrees.heads, other.inner - degrees.inner, other.outer - degrees.outer]
        return sum(map(bool, apart)), sum(map(abs, apart))

    return ", ".join(str(found) for found in sorted(legal_degrees(size, model), key=distance)[:4])


def _axis_problems(attention: AttentionConfig, preset: Preset) -> list[str]:
    """Return violated rules between the axes, independent of the number of ranks."""
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
            problems.append(f"attention.{name}={value} needs chunks; set attention.chunk_tokens, or leave it null")
    if chunked:
        problems += _chunk_problems(attention, transport, order)
    if circulates == "q" and transport == "all_gather":
        problems.append(
            "attention.kv_transport=all_gather moves no q in backward; set attention.backward_circulates=kv"
        )
    if order == "reversed" and transport == "all_gather":
        problems.append(
            "attention.backward_order=reversed reverses a ring, and attention.kv_transport=all_gather has none"
        )
    if order == "reversed" and circulates in ("q", "auto"):
        problems.append("attention.backward_order=reversed moves k and v; set attention.backward_circulates=kv")
    return problems


def _chunk_problems(attention: AttentionConfig, transport: KvTransport, order: BackwardOrder) -> list[str]:
    """Chunks exclude all but a plain ring with k and v moving: key chunks move around it one after another."""
    refused = {
        "kv_transport=all_gather": transport == "all_gather",
        "backward_order=reversed": order == "reversed",
        "backward_circulates=q": attention.backward_circulates == "q",
    }
    return [
        f"attention.{name} and chunks exclude each other: chunks of keys and values move around a plain ring; leave it "
        "null, or attention.chunk_tokens"
        for name, given in refused.items()
        if given
    ]


def method_on(config: RunConfig, world: Topology) -> AttentionMethod:
    """Return `legal_attention` on the ranks of `world`: enough to count memory, whatever the moving operand is."""
    return legal_attention(config, sequence_topology(config, world))
