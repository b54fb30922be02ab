"""Whether a run fits into the memory there is, and what to change if not. No torch: the prediction is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.memory.capacity import Capacity
from engine.memory.estimate import MemoryEstimate, estimate_memory
from engine.planning.methods.degrees import tensor_parallel_problems
from engine.planning.methods.presets import AttentionMethod, resolve_attention
from engine.planning.methods.topology import Topology

MOST_RANKS = 1024  # advice speaks of no more
_NODE_RANKS = 8
_LENGTH_STEPS = 64


class Prediction(Protocol):
    """What an estimate and `engine.memory.predict.MemoryPrediction` have in common; bytes of one rank."""

    @property
    def device_peak_bytes(self) -> int:
        """Tensors on the device."""
        ...

    @property
    def host_peak_bytes(self) -> int:
        """Tensors in host memory."""
        ...

    @property
    def needed_bytes(self) -> int:
        """Device memory that must be there: the peak, and what no tensor has."""
        ...

    @property
    def phase(self) -> str:
        """When the device's peak comes."""
        ...

    @property
    def components(self) -> Mapping[str, Mapping[str, int]]:
        """{"device": {name: bytes}, "host": {name: bytes}}."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        ...


# Predicts a configuration on the ranks of a topology (of the whole world).
Predict = Callable[[RunConfig, Topology], Prediction]


@dataclass(frozen=True)
class Fit:
    """One figure against the capacity; headroom is of the memory that is fuller, negative if bytes are missing."""

    device: bool
    host: bool
    headroom_bytes: int

    @property
    def fits(self) -> bool:
        """Both."""
        return self.device and self.host


def fit_of(prediction: Prediction, capacity: Capacity, margin: float = 0.0) -> Fit:
    """Whether a prediction fits, with a share `margin` of itself to spare for what it may be wrong by."""
    needed = round(prediction.needed_bytes * (1 + margin))
    host = round(prediction.host_peak_bytes * (1 + margin))
    headroom = capacity.headroom_bytes(needed, host)
    if capacity.host_is_device:
        return Fit(headroom >= 0, headroom >= 0, headroom)
    per_rank = capacity.host_bytes_per_rank
    return Fit(needed <= capacity.device_bytes, per_rank is None or host <= per_rank, headroom)


def sequence_topology(config: RunConfig, world: Topology) -> Topology:
    """Where the ranks of one sequence lie: of a node's ranks every tp_size-th. Raises ConfigError where none can."""
    parallel = config.parallel
    others = parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size
    if world.size % others or world.local_ranks % parallel.tp_size:
        raise ConfigError(
            f"parallel: {others} x cp_size does not divide {world.size} ranks, {world.local_ranks} a node"
        )
    cp_size = parallel.cp_size or world.size // others
    return Topology(world.nodes, world.local_ranks // parallel.tp_size).group(cp_size)


def estimate_on(config: RunConfig, world: Topology) -> MemoryEstimate:
    """The closed form of a configuration on so many ranks. Raises ConfigError where it cannot run there."""
    return estimate_memory(config, method_on(config, world))


def method_on(config: RunConfig, world: Topology) -> AttentionMethod:
    """The attention method on these ranks; `attention=auto` must have been settled."""
    return resolve_attention(config, sequence_topology(config, world))


def estimated_fit(config: RunConfig, world: Topology, capacity: Capacity, margin: float) -> bool:
    """Whether the closed form fits; a configuration that cannot run does not."""
    try:
        return fit_of(estimate_on(config, world), replace(capacity, local_ranks=world.local_ranks), margin).fits
    except ConfigError:
        return False


def advise(config: RunConfig, world: Topology, capacity: Capacity, margin: float) -> list[str]:
    """Changes with which the closed form of `config` fits, one sentence each: ranks, tensor parallelism, 8-bit moments,
    length."""
    changes = (_more_ranks, _more_tp, _small_moments, _shorter_sequence)
    found = [change(config, world, capacity, margin) for change in changes]
    return [text for text in found if text is not None]


def too_large_model(config: RunConfig, world: Topology, capacity: Capacity) -> str | None:
    """What to say where the model's own states leave no room for a single token."""
    places = estimate_on(config, world).components
    counted = places.values() if capacity.host_is_device else (places["device"],)
    states = sum(sizes.get(name, 0) for sizes in counted for name in ("parameters", "gradients", "optimizer"))
    if states <= capacity.device_bytes:
        return None
    return (
        f"a smaller model: weights, gradients and optimizer states alone take {states / 2**30:.3g} GiB of a rank, "
        "whatever train.seq_len is"
    )


def _more_ranks(config: RunConfig, world: Topology, capacity: Capacity, margin: float) -> str | None:
    """The smallest number of ranks, all sharing the sequence, that fits."""

    def fits(larger: Topology) -> bool:
        return estimated_fit(with_ranks(config, world, larger), larger, capacity, margin)

    known = world
    for larger in _larger(world, more_per_node=not capacity.host_is_device):  # on CPUs they share the node's memory
        if fits(larger):
            enough = _fewest_nodes(known, larger, fits)
            where = f"{enough.size} ranks" + (f" ({enough.nodes} nodes of {enough.local_ranks})" * (enough.nodes > 1))
            return f"{where} instead of {world.size} would fit: each then holds {_share(config, world, enough)} tokens"
        known = larger
    return None


def _share(config: RunConfig, world: Topology, larger: Topology) -> str:
    ranks = sequence_topology(with_ranks(config, world, larger), larger).size
    return f"{-(-config.train.seq_len // ranks):,}"


def _larger(world: Topology, *, more_per_node: bool) -> Iterator[Topology]:
    """Twice as many ranks, and again: up to eight in a node where that helps, then more nodes."""
    local, nodes = world.local_ranks, world.nodes
    while 2 * local * nodes <= MOST_RANKS:
        fills_node = more_per_node and nodes == 1 and 2 * local <= _NODE_RANKS
        local, nodes = (2 * local, nodes) if fills_node else (local, 2 * nodes)
        yield Topology(nodes, local)


def _fewest_nodes(too_few: Topology, enough: Topology, fits: Callable[[Topology], bool]) -> Topology:
    """Bisection between two numbers of nodes of the same size."""
    if too_few.local_ranks != enough.local_ranks:
        return enough
    low, high = too_few.nodes, enough.nodes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(Topology(middle, enough.local_ranks)) else (middle, high)
    return Topology(high, enough.local_ranks)


def with_ranks(config: RunConfig, world: Topology, larger: Topology) -> RunConfig:
    """The same run on more ranks, which all share the sequence."""
    parallel = config.parallel
    if parallel.cp_size is not None:
        cp_size = parallel.cp_size * larger.size // world.size
        parallel = replace(parallel, cp_size=cp_size)
    # A shape given for fewer ranks would be illegal on more: the preset's own is taken.
    attention = replace(config.attention, head_parallel_size=None, ring_inner_size=None, ring_outer_size=None)
    attention = replace(attention, preset="burst") if attention.preset == "single" else attention
    return replace(config, parallel=parallel, attention=attention)


def _more_tp(config: RunConfig, world: Topology, capacity: Capacity, margin: float) -> str | None:
    """The smallest tensor parallel degree inside a node that fits on the same ranks."""
    sizes = [size for size in (2, 4, 8) if size > config.parallel.tp_size and world.local_ranks % size == 0]
    for size in sizes:
        if tensor_parallel_problems(config.model, size):
            continue
        attention = replace(config.attention, head_parallel_size=None, ring_inner_size=None, ring_outer_size=None)
        changed = replace(
            config,
            attention=attention,
            parallel=replace(config.parallel, tp_size=size, cp_size=None),
            memory=replace(config.memory, tile_tokens=None),
        )
        if estimated_fit(changed, world, capacity, margin):
            return f"parallel.tp_size={size} parallel.cp_size=null would fit on the same ranks"
    return None


def _small_moments(config: RunConfig, world: Topology, capacity: Capacity, margin: float) -> str | None:
    if config.memory.moments_dtype == "int8":
        return None
    changed = replace(config, memory=replace(config.memory, moments_dtype="int8"))
    fits = estimated_fit(changed, world, capacity, margin)
    return "memory.moments_dtype=int8 would fit on the same ranks" if fits else None


def _shorter_sequence(config: RunConfig, world: Topology, capacity: Capacity, margin: float) -> str | None:
    """The longest sequence, in 64ths of the configured one, that fits on the same ranks."""

    def length(part: int) -> int:
        tokens = config.train.seq_len * part // _LENGTH_STEPS
        return tokens // 1024 * 1024 if tokens >= 1024 else tokens

    low, high = 0, _LENGTH_STEPS
    while high - low > 1:
        middle = (low + high) // 2
        shorter = replace(config, train=replace(config.train, seq_len=max(1, length(middle))))
        low, high = (middle, high) if estimated_fit(shorter, world, capacity, margin) else (low, middle)
    return f"train.seq_len={length(low)} would fit on the same ranks" if length(low) else None
