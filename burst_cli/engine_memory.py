"""The engine's knowledge of memory as `check_memory` asks for it. The exact prediction runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from burst_cli.memory_check import Place
from engine.config.settings import RunConfig
from engine.memory.auto import MemoryChoice, advice_for, settle_memory
from engine.memory.capacity import Capacity, Hardware, capacity_of
from engine.memory.fit import Prediction, estimate_on, sequence_topology
from engine.memory.predict_apart import predict_apart
from engine.planning.methods.auto import machine_of, settle_auto
from engine.planning.methods.topology import Topology
from engine.runs.oom import less_memory_text


class EnginePlanner:
    """A `MemoryPlanner`, after `settle_attention`.

    say: told, for people, that a prediction begins, which takes seconds. hardware: of the machines that ranks run on,
    None: this one.
    """

    def __init__(self, say: Callable[[str], None], hardware: Hardware | None = None) -> None:
        self._say, self._hardware = say, hardware

    def settle_attention(self, config: RunConfig) -> RunConfig:
        """The method in place of attention=auto, as the ranks will settle it: by the name of their device."""
        if config.attention.preset != "auto":
            return config
        machine = machine_of(config, self.capacity(config).device_name)
        return settle_auto(config, sequence_topology(config, _world(config)), machine).config

    def capacity(self, config: RunConfig) -> Capacity:
        """The GPUs or the RAM of a machine, within memory.device_bytes and memory.host_bytes."""
        # All its ranks share a machine, also those that cluster.topology_nodes treats as lying on others.
        return capacity_of(config, config.cluster.ranks_per_node or 1, hardware=self._hardware)

    def settle(self, config: RunConfig, capacity: Capacity, *, exactly: bool) -> MemoryChoice:
        """The choice of `engine.memory.auto`."""
        return settle_memory(config, _world(config), capacity, verify=self._predict if exactly else None)

    def estimate(self, config: RunConfig) -> Prediction:
        """The closed form of `engine.memory.estimate`."""
        return estimate_on(config, _world(config))

    def predict(self, config: RunConfig) -> Prediction:
        """The prediction of `engine.memory.predict`."""
        return self._predict(config, _world(config))

    def advice(self, config: RunConfig, capacity: Capacity, place: Place) -> str:
        """Changes with which the run is known to fit, or else the settings that need less."""
        found = advice_for(config, _world(config), capacity)
        return f"What helps: {'; '.join(found)}." if found else less_memory_text(config, place)

    def _predict(self, config: RunConfig, world: Topology) -> Prediction:
        self._say(f"predicting the memory of a step under {config.memory.activation_checkpoint}")
        return predict_apart(config, world)


def _world(config: RunConfig) -> Topology:
    """Where all ranks of a launch lie."""
    ranks, nodes = config.cluster.world_size or 1, config.cluster.topology_groups
    return Topology(nodes, ranks // nodes)
