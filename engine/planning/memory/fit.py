"""Whether a run fits into the memory there is, and what to change if not. No torch: the prediction is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, RunConfig
from engine.planning.memory.capacity import Capacity
from engine.planning.memory.cost import PolicyCost, layers_on_host, own_parameters, policy_cost, state_bytes
from engine.planning.memory.predictor import MemoryPrediction, Predict
from engine.planning.methods.degrees import tensor_parallel_problems
from engine.planning.methods.presets import AttentionMethod, legal_attention
from engine.planning.methods.topology import Topology

MOST_TIMES = 16  # as many ranks, or as few tokens, at most
_NODE_RANKS = 8


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


def fit_of(device_bytes: int, host_bytes: int, capacity: Capacity) -> Fit:
    """Whether a rank that needs so much fits."""
    headroom = capacity.headroom_bytes(device_bytes, host_bytes)
    if capacity.host_is_device:
        return Fit(headroom >= 0, headroom >= 0, headroom)
    per_rank = capacity.host_bytes_per_rank
    return Fit(device_bytes <= capacity.device_bytes, per_rank is None or host_bytes <= per_rank, headroom)


def predicted_fit(prediction: MemoryPrediction, capacity: Capacity) -> Fit:
    """Whether what was predicted fits."""
    return fit_of(prediction.needed_bytes, prediction.host_peak_bytes, capacity)


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


def method_on(config: RunConfig, world: Topology) -> AttentionMethod:
    """The attention method on these ranks, as far as memory asks; `attention=auto` must have been settled."""
    return legal_attention(config, sequence_topology(config, world))


def least_bytes(config: RunConfig, method: AttentionMethod, cost: PolicyCost) -> tuple[int, int]:
    """(device, host) bytes that a rank has at the end of a forward pass, whatever else it needs: weights, optimizer
    states and what the layers keep.
    """
    states = state_bytes(config.memory, own_parameters(config, method), gradients=False)
    there = sum(layer.kept_bytes for layer in cost.layers[: layers_on_host(config, method)])
    if config.memory.optimizer_store == "host" and config.cluster.backend != "gloo":
        return cost.kept_bytes - there, there + states
    return cost.kept_bytes - there + states, there


@dataclass(frozen=True)
class Advisor:
    """What to change about a run that does not fit; one sentence each, all predicted."""

    config: RunConfig
    world: Topology
    capacity: Capacity
    predict: Predict

    def advise(self) -> list[str]:
        """Ranks, tensor parallelism, 8-bit moments, length; a smaller model where that alone is too large."""
        found = [self._more_ranks(), self._more_tp(), self._small_moments()]
        found.append(self._smaller_model() or self._shorter_sequence())
        return [text for text in found if text is not None]

    def _fits(self, config: RunConfig, world: Topology) -> bool:
        """A configuration that cannot run does not; one that keeps too much is not predicted."""
        capacity = replace(self.capacity, local_ranks=world.local_ranks)
        try:
            method = method_on(config, world)
            least = least_bytes(config, method, policy_cost(config, method))
            return fit_of(*least, capacity).fits and predicted_fit(self.predict(config, world), capacity).fits
        except ConfigError:
            return False

    def _more_ranks(self) -> str | None:
        """The fewest nodes, or ranks of one node, that fit and all share the sequence."""

        def fits(larger: Topology) -> bool:
            return self._fits(with_ranks(self.config, self.world, larger), larger)

        known, world = self.world, self.world
        for larger in _larger(world, more_per_node=not self.capacity.host_is_device):  # CPUs share the node's memory
            if fits(larger):
                enough = _fewest_nodes(known, larger, fits)
                where = f"{enough.size} ranks" + (
                    f" ({enough.nodes} nodes of {enough.local_ranks})" * (enough.nodes > 1)
                )
                ranks = sequence_topology(with_ranks(self.config, world, enough), enough).size
                share = f"{-(-self.config.train.seq_len // ranks):,}"
                return f"{where} instead of {world.size} would fit: each then holds {share} tokens"
            known = larger
        return None

    def _more_tp(self) -> str | None:
        """The smallest tensor parallel degree inside a node that fits on the same ranks."""
        config, local = self.config, self.world.local_ranks
        for size in (size for size in (2, 4, 8) if size > config.parallel.tp_size and local % size == 0):
            changed = replace(
                config,
                attention=_without_shape(config.attention),
                parallel=replace(config.parallel, tp_size=size, cp_size=None),
                memory=replace(config.memory, tile_tokens=None),
            )
            if not list(tensor_parallel_problems(config.model, size)) and self._fits(changed, self.world):
                return f"parallel.tp_size={size} parallel.cp_size=null would fit on the same ranks"
        return None

    def _small_moments(self) -> str | None:
        memory = self.config.memory
        changed = replace(self.config, memory=replace(memory, moments_dtype="int8"))
        fits = memory.moments_dtype != "int8" and self._fits(changed, self.world)
        return "memory.moments_dtype=int8 would fit on the same ranks" if fits else None

    def _shorter_sequence(self) -> str | None:
        """Half of the tokens, or a quarter, and so on."""
        whole = tokens = self.config.train.seq_len
        while tokens > 1 and MOST_TIMES * tokens > whole:
            tokens //= 2
            if self._fits(replace(self.config, train=replace(self.config.train, seq_len=tokens)), self.world):
                return f"train.seq_len={tokens} would fit on the same ranks"
        return None

    def _smaller_model(self) -> str | None:
        """What to say where the model's own states leave no room for a single token."""
        config = self.config
        states = state_bytes(config.memory, own_parameters(config, method_on(config, self.world)))
        on_device = config.memory.optimizer_store == "device" or self.capacity.host_is_device
        if not on_device or states <= self.capacity.device_bytes:
            return None
        return (
            f"a smaller model: weights, gradients and optimizer states alone take {states / 2**30:.3g} GiB of a rank, "
            "whatever train.seq_len is"
        )


def _larger(world: Topology, *, more_per_node: bool) -> Iterator[Topology]:
    """Twice as many ranks, and again: up to eight in a node where that helps, then more nodes."""
    local, nodes = world.local_ranks, world.nodes
    while 2 * local * nodes <= MOST_TIMES * world.size:
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
    attention = _without_shape(config.attention)
    attention = replace(attention, preset="burst") if attention.preset == "single" else attention
    return replace(config, parallel=parallel, attention=attention)


def _without_shape(attention: AttentionConfig) -> AttentionConfig:
    """A shape given for other ranks would be illegal: the preset's own is taken."""
    return replace(attention, head_parallel_size=None, ring_inner_size=None, ring_outer_size=None)
