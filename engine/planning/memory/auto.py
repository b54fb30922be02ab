"""memory=auto: the fastest checkpoint policy that fits, and what it was chosen from. No torch.

Every policy may keep on the device or in host memory, with projections and MLP whole and in tiles; with the optimizer
on the host where none fits, or a faster one then does. Their memory is predicted (`engine.memory.predict`) in the order
of a step's seconds (`engine.planning.time.step_time`) until one fits. What one keeps is known without either, so that
those that are hopeless, or slower for certain than one that is not, need neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, RunConfig, Store
from engine.planning.memory.capacity import Capacity, Fit, fit_of, predicted_fit
from engine.planning.memory.cost import PolicyCost, least_bytes, method_on, policy_cost
from engine.planning.memory.policy import policy_name
from engine.planning.memory.predictor import MemoryChoice, MemoryPrediction, Predict
from engine.planning.methods.auto import Choice, resolve_auto
from engine.planning.methods.presets import BYTES_OF
from engine.planning.methods.topology import Topology, sequence_topology
from engine.planning.time.machine import Machine, machine_of
from engine.planning.time.step_time import predict_step

# Nearer than this share of a step, times say nothing: then the policy is taken that moves and divides least.
INDIFFERENCE = 0.01
MOST_GUESSES = 2  # of how many layers of a policy keep on the host
MOST_PREDICTED = 12  # candidates in a round, about a second each
KEPT_FRACTIONS = (0.75, 0.5, 0.25)
GROUP_SIZES = (2, 4)
LEAST_TILE_TOKENS = 1024
TILE_SHARE = 0.01  # of the device, for what a tile computes


@dataclass(frozen=True)
class MemoryCandidate:
    """A policy with what it costs, and what it needs where that was predicted.

    least        (device, host) bytes that a rank has at the end of a forward pass, whatever else it needs
    step_s       seconds of a step; None: another one is faster for certain, and may fit
    """

    memory: MemoryConfig
    cost: PolicyCost
    least: tuple[int, int]
    step_s: float | None = None
    prediction: MemoryPrediction | None = None
    fit: Fit | None = None

    @property
    def fits(self) -> bool | None:
        """On the device and on the host; None: not predicted."""
        return None if self.fit is None else self.fit.fits

    @property
    def name(self) -> str:
        """The policy in words that name its settings."""
        return policy_name(self.memory)

    @property
    def settings(self) -> str:
        """The policy as overrides."""
        memory = self.memory
        names = ["activation_checkpoint", "activation_store"]
        names += ["host_layers"] * (memory.host_layers is not None)
        names += ["kept_fraction"] * (memory.activation_checkpoint == "seq_fraction")
        names += ["every_layers"] * (memory.activation_checkpoint == "attn_out_every")
        names += ["tile_tokens"] * (memory.tile_tokens is not None) + ["optimizer_store"]
        return " ".join(f"memory.{name}={getattr(memory, name)}" for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for tables and JSON; null what was not predicted."""
        memory, found = self.memory, self.prediction
        return {
            "name": self.name,
            "activation_checkpoint": memory.activation_checkpoint,
            "kept_fraction": memory.kept_fraction if memory.activation_checkpoint == "seq_fraction" else None,
            "every_layers": memory.every_layers if memory.activation_checkpoint == "attn_out_every" else None,
            "activation_store": memory.activation_store,
            "host_layers": memory.host_layers,
            "tile_tokens": memory.tile_tokens,
            "optimizer_store": memory.optimizer_store,
            "device_peak_bytes": found and found.device_peak_bytes,
            "needed_bytes": found and found.needed_bytes,
            "host_peak_bytes": found and found.host_peak_bytes,
            "kept_bytes": self.cost.kept_bytes,
            "moved_bytes": self.cost.moved_bytes,
            "recompute_linear_flops": self.cost.linear_flops,
            "recompute_attention_flops": self.cost.attention_flops,
            "step_s": self.step_s,
            "fits": self.fits,
            "fits_device": self.fit and self.fit.device,
            "fits_host": self.fit and self.fit.host,
        }


def settle_run(
    config: RunConfig, world: Topology, capacity: Capacity, predict: Predict, machine: Machine | None = None
) -> tuple[Choice, MemoryChoice]:
    """First attention=auto, then memory=auto, on the ranks of `world`; what names its method or policy is kept."""
    attention = resolve_auto(config, sequence_topology(config, world), machine)
    return attention, settle_memory(attention.config, world, capacity, predict, machine)


def settle_memory(
    config: RunConfig, world: Topology, capacity: Capacity, predict: Predict, machine: Machine | None = None
) -> MemoryChoice:
    """The fastest policy that fits on the ranks of `world`; a config that names its policy is kept.

    `attention=auto` must have been settled.
    """
    if config.memory.activation_checkpoint != "auto":
        return MemoryChoice(config, (), "as configured")
    search = _Search(config, world, capacity, machine or machine_of(config, capacity.device_name), predict)
    best = search.best()
    chosen = replace(config, memory=best.memory)
    assert best.fit is not None
    if best.fit.fits:
        reason = (
            f"auto: {best.name} is predicted at {best.step_s:.3g} s a step, and no policy that fits saves more than "
            f"{INDIFFERENCE:.0%} of that; it leaves {best.fit.headroom_bytes / 2**30:.3g} GiB free"
        )
        return MemoryChoice(chosen, search.candidates(best), reason)
    missing = -best.fit.headroom_bytes / 2**30
    reason = f"no policy fits on {capacity.device_name}; the nearest, {best.name}, lacks {missing:.3g} GiB"
    return MemoryChoice(chosen, search.candidates(best), reason, fits=False)


class _Search:
    """Policies on trial: a run whose attention is settled, its ranks, the memory and the speed they have."""

    def __init__(
        self, config: RunConfig, world: Topology, capacity: Capacity, machine: Machine, predict: Predict
    ) -> None:
        self._config, self._world, self._capacity, self._machine = config, world, capacity, machine
        self._predict = predict
        self._known: dict[MemoryConfig, MemoryCandidate] = {}
        self._shown: list[MemoryCandidate] = []
        # Bytes beside the least, of policies that work alike; the most of those that were predicted.
        self._working: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._own_only = False  # reckon with what the same policy needed, not with others like it

    def best(self) -> MemoryCandidate:
        """The fastest that fits, else the one of those predicted that lacks least."""
        problems: list[str] = []
        found: MemoryCandidate | None = None
        for memories in _rounds(self._config, self._world, self._capacity):
            if found is not None and not found.cost.recompute_flops + found.cost.moved_bytes:
                return found  # with the optimizer on the host nothing would be faster
            legal = []
            for memory in memories:
                try:
                    self._candidate(memory)
                    legal.append(memory)
                except ConfigError as error:  # tiles under tensor parallelism
                    problems += error.problems
            faster = self._first_that_fits(legal, than=found)
            found = faster or found or self._leanest_that_fits(legal)
        if found is not None:
            return found
        if not self._shown:
            raise ConfigError(list(dict.fromkeys(problems)))
        predicted = [one for one in self._known.values() if one.fit is not None]
        if not predicted:
            nearest = max(self._shown, key=lambda one: self._capacity.headroom_bytes(*one.least))
            predicted = [self._predicted(nearest)]
        return max(predicted, key=lambda one: one.fit.headroom_bytes if one.fit else 0)

    def candidates(self, best: MemoryCandidate) -> tuple[MemoryCandidate, ...]:
        """All, `best` first, then those that were not tried, by time, then those that were, the nearest first."""
        refuted = [one for one in self._known.values() if one.fit is not None and one.memory != best.memory]
        refuted.sort(key=lambda one: -one.fit.headroom_bytes if one.fit else 0)
        seen = {one.memory for one in (best, *refuted)}
        others = [self._known[one.memory] for one in self._shown if one.memory not in seen]
        others.sort(key=lambda one: (not self._may_fit(one), one.step_s or math.inf))
        return best, *others, *refuted

    def _first_that_fits(
        self, memories: Sequence[MemoryConfig], *, than: MemoryCandidate | None = None
    ) -> MemoryCandidate | None:
        """The fastest that fits, if it is faster than another one."""
        within_s = math.inf if than is None else self._timed(than)[0] * (1 - INDIFFERENCE)
        earlier = self._shown
        for _ in range(MOST_PREDICTED):
            placed = [self._with_fewest_on_host(memory) for memory in memories]
            self._shown = earlier + placed
            hopeful = [one for one in placed if self._may_fit(one)]
            if not hopeful:
                return None
            fastest = self._fastest(hopeful)
            if self._timed(fastest)[0] > within_s:
                return None
            found = self._predicted(fastest)
            if found.fits:
                return found
        return None

    def _leanest_that_fits(self, memories: Sequence[MemoryConfig]) -> MemoryCandidate | None:
        """The policy that keeps least by its own working set: that of others, which may need more, has ruled it out."""
        self._own_only = True
        try:
            return self._first_that_fits([memory for memory in memories if memory.activation_checkpoint == "full"])
        finally:
            self._own_only = False

    def _fastest(self, hopeful: Sequence[MemoryCandidate]) -> MemoryCandidate:
        """The one that takes least time; of those alike the one that moves nothing and is whole."""
        timed = [self._timed(one) for one in hopeful if not any(_is_faster(other, one) for other in hopeful)]
        least_s = min(step_s for step_s, _ in timed)

        def order(found: tuple[float, MemoryCandidate]) -> tuple[float, ...]:
            step_s, one = found
            is_on_host, is_tiled = one.memory.activation_store == "host", one.memory.tile_tokens is not None
            return (step_s - least_s) // (INDIFFERENCE * least_s), is_on_host, is_tiled, step_s, sum(one.least)

        return min(timed, key=order)[1]

    def _timed(self, candidate: MemoryCandidate) -> tuple[float, MemoryCandidate]:
        """(seconds of a step, the candidate with them)."""
        if candidate.step_s is None:
            step = predict_step(replace(self._config, memory=candidate.memory), self._world, self._machine)
            candidate = self._known[candidate.memory] = replace(candidate, step_s=step.seconds)
        assert candidate.step_s is not None
        return candidate.step_s, candidate

    def _candidate(self, memory: MemoryConfig) -> MemoryCandidate:
        """One policy. Raises ConfigError where the configuration cannot run with it."""
        if memory not in self._known:
            tried = replace(self._config, memory=memory)
            method = method_on(tried, self._world)
            cost = policy_cost(tried, method)
            self._known[memory] = MemoryCandidate(memory, cost, least_bytes(tried, method, cost))
        return self._known[memory]

    def _predicted(self, candidate: MemoryCandidate) -> MemoryCandidate:
        prediction = self._predict(replace(self._config, memory=candidate.memory), self._world)
        fit = predicted_fit(prediction, self._capacity)
        found = replace(candidate, prediction=prediction, fit=fit)
        self._known[candidate.memory] = found
        device, host = candidate.least
        now = prediction.needed_bytes - device, prediction.host_peak_bytes - host
        for key in (_working_alike(candidate.memory, own=own) for own in (False, True)):
            before = self._working.get(key, (0, 0))
            self._working[key] = max(before[0], now[0]), max(before[1], now[1])
        return found

    def _may_fit(self, candidate: MemoryCandidate) -> bool:
        return self._expected(candidate).fits

    def _expected(self, candidate: MemoryCandidate) -> Fit:
        """As predicted, else as those that work alike and keep something else."""
        if candidate.fit is not None:
            return candidate.fit
        device, host = self._working.get(_working_alike(candidate.memory, own=self._own_only), (0, 0))
        return fit_of(candidate.least[0] + device, candidate.least[1] + host, self._capacity)

    def _with_fewest_on_host(self, memory: MemoryConfig) -> MemoryCandidate:
        """The candidate with as few layers on the host as leave the others room on the device.

        As it is where nothing lies on the host, where not even all layers there are enough, where it is settled, and
        where none need be there: that is a candidate of its own. And where two guesses were wrong: the peak then hardly
        depends on the layers, and a step of one at a time would use up all predictions.
        """
        candidate = self._candidate(memory)
        is_free = memory.activation_store == "host" and memory.host_layers is None
        if not is_free or self._keeps_chunks_on_host() or not self._expected(candidate).device:
            return candidate
        refuted = [one for one in self._known.values() if one.fit and replace(one.memory, host_layers=None) == memory]
        if len(refuted) >= MOST_GUESSES:
            return candidate
        if self._expected(self._candidate(replace(memory, activation_store="device"))).device:
            return candidate
        too_few, enough = 0, self._config.model.num_layers
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self._expected(self._candidate(replace(memory, host_layers=middle))).device:
                enough = middle
            else:
                too_few = middle
        fewest = self._config.model.num_layers > enough
        return self._candidate(replace(memory, host_layers=enough)) if fewest else candidate

    def _keeps_chunks_on_host(self) -> bool:
        return method_on(self._config, self._world).chunk_store == "host"


def _is_faster(one: MemoryCandidate, other: MemoryCandidate) -> bool:
    """Whether a policy computes nothing again and moves nothing that the other does not, and less of something."""
    costs = [(c.cost.linear_flops, c.cost.attention_flops, c.cost.moved_bytes) for c in (one, other)]
    return costs[0] != costs[1] and all(less <= more for less, more in zip(*costs, strict=True))


def _working_alike(memory: MemoryConfig, *, own: bool) -> tuple[Any, ...]:
    """What the bytes beside the least depend on; `own`: by the policy too, for what is computed again differs."""
    kind = memory.activation_checkpoint if own else memory.activation_checkpoint == "none"
    return kind, memory.tile_tokens, memory.activation_store, memory.optimizer_store


def _rounds(config: RunConfig, world: Topology, capacity: Capacity) -> Iterator[list[MemoryConfig]]:
    """With and without tiles; then with the optimizer on the host. What the configuration says is not changed.

    Host memory of unknown size is not used.
    """
    memory = replace(config.memory, checkpoint_layers=())
    has_host = capacity.host_bytes_per_node is not None and not capacity.host_is_device
    stores: tuple[Store, ...] = ("device", "host") if has_host else ("device",)
    if memory.activation_store is not None:
        stores = (memory.activation_store,)
    first = [_kept_in(store, policy) for store in stores for policy in _policies(memory)]
    rows = config.train.seq_len // sequence_topology(config, world).size
    tile_tokens = _tile_tokens(config, rows, capacity)
    tiled = [replace(policy, tile_tokens=tile_tokens) for policy in first]
    tileable = memory.tile_tokens is None and config.attention.chunk_tokens is None and rows > tile_tokens
    yield [*first, *tiled] if tileable else first
    if memory.optimizer_store == "device" and has_host:
        yield [replace(policy, optimizer_store="host") for policy in (tiled if tileable else first)]


def _tile_tokens(config: RunConfig, rows: int, capacity: Capacity) -> int:
    """Rows of a tile: as many as a matrix of the layer is wide, for fast products, and more where there is room.

    For every tile adds its gradients to those of all weights. Room: an eighth of the rows, and of the device a little
    for gate, up, their product and the gradients of these.
    """
    model = config.model
    row_bytes = 6 * model.ffn_hidden_size * BYTES_OF[config.train.compute_dtype]
    tile_tokens = max(LEAST_TILE_TOKENS, model.hidden_size)
    while 16 * tile_tokens <= rows and 2 * tile_tokens * row_bytes <= TILE_SHARE * capacity.device_bytes:
        tile_tokens *= 2
    return tile_tokens


def _kept_in(store: Store, memory: MemoryConfig) -> MemoryConfig:
    return replace(memory, activation_store=store, host_layers=memory.host_layers if store == "host" else None)


def _policies(memory: MemoryConfig) -> Iterator[MemoryConfig]:
    yield replace(memory, activation_checkpoint="none")
    yield replace(memory, activation_checkpoint="attn_out")
    for fraction in KEPT_FRACTIONS:
        yield replace(memory, activation_checkpoint="seq_fraction", kept_fraction=fraction)
    for size in GROUP_SIZES:
        yield replace(memory, activation_checkpoint="attn_out_every", every_layers=size)
    yield replace(memory, activation_checkpoint="full")
