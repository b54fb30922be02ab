"""What a checkpoint policy adds to a step, in seconds, by a simple model: recomputation, copies, updates on the host.

Matrices are taken at the rate of the machine's attention forward kernel: both are limited by the same units.
"""

from __future__ import annotations

from engine.attention.topology import Topology
from engine.config import RunConfig
from engine.flops import count_parameters, step_flops
from engine.memory.kept import LayerCost, PolicyCost
from engine.simulate.machine import Machine

# AdamW on the host reads and writes 28 bytes per number; a server's memory bandwidth, shared by eight ranks.
HOST_UPDATE_BYTES = 28
HOST_UPDATE_BYTES_PER_S = 25e9


def plain_step_seconds(config: RunConfig, world: Topology, machine: Machine) -> float:
    """A step in which nothing is computed again or waited for."""
    return 3 * _forward_flops(config) / world.size / machine.forward_flops_per_s


def extra_seconds(config: RunConfig, world: Topology, cost: PolicyCost, machine: Machine) -> float:
    """Recomputation at the machine's forward rate, matrices too; copies that compute does not hide; host updates."""
    rate = machine.forward_flops_per_s
    forward_s = _forward_flops(config) / world.size / rate
    again_s = cost.linear_flops / world.size / rate
    again_s += sum(map(_busiest_flops, cost.layers)) * _sequences(config) / config.parallel.tp_size / rate
    one_way_s = cost.moved_bytes / 2 / machine.host_bytes_per_s
    exposed_s = max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - 2 * forward_s - again_s)
    return again_s + exposed_s + _host_update_seconds(config, world)


def _busiest_flops(layer: LayerCost) -> float:
    return layer.attention_flops * layer.busiest_share


def _sequences(config: RunConfig) -> int:
    """Sequences that one group of ranks works on in a step."""
    return config.train.micro_batch_size * config.train.grad_accum_steps


def _forward_flops(config: RunConfig) -> float:
    """Of a whole step, half of all pairs visible: what there is to hide copies behind."""
    groups = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
    seq_len = config.train.seq_len
    sequences = groups * _sequences(config)
    pairs = config.model.num_layers * sequences * (seq_len**2 // 2)
    return step_flops(config.model, seq_len=seq_len, visible_pairs=pairs, sequences=sequences).model / 3


def _host_update_seconds(config: RunConfig, world: Topology) -> float:
    if config.memory.optimizer_store == "device":
        return 0.0
    shards = world.size // config.parallel.dp_replicate_size
    return count_parameters(config.model).total / shards * HOST_UPDATE_BYTES / HOST_UPDATE_BYTES_PER_S
