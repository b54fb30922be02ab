"""Whether a run fits into the memory there is. No torch: the prediction is passed in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config.settings import AttentionConfig, RunConfig
from engine.planning.memory.capacity import Capacity
from engine.planning.memory.cost import PolicyCost, layers_on_host, own_parameters, state_bytes
from engine.planning.memory.predictor import MemoryPrediction
from engine.planning.methods.presets import AttentionMethod, legal_attention
from engine.planning.methods.topology import Topology, place_ranks


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
    """Where the ranks of one sequence lie. Raises ConfigError where none can."""
    degrees, topology = place_ranks(config.parallel, world.size, world.nodes)
    return degrees.cp_topology(topology)


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


def with_ranks(config: RunConfig, world: Topology, larger: Topology) -> RunConfig:
    """The same run on more ranks, which all share the sequence."""
    parallel = config.parallel
    if parallel.cp_size is not None:
        cp_size = parallel.cp_size * larger.size // world.size
        parallel = replace(parallel, cp_size=cp_size)
    attention = without_shape(config.attention)
    attention = replace(attention, preset="burst") if attention.preset == "single" else attention
    return replace(config, parallel=parallel, attention=attention)


def without_shape(attention: AttentionConfig) -> AttentionConfig:
    """A shape given for other ranks would be illegal: the preset's own is taken."""
    return replace(attention, head_parallel_size=None, ring_inner_size=None, ring_outer_size=None)
