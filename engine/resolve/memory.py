"""memory=auto: select the fastest checkpoint policy that fits into memory. No torch.

A candidate stores saved tensors on the device or on the host, and runs projections and MLP whole or in tiles. The
optimizer moves to the host if no candidate fits otherwise, or if a faster one then fits. Peak memory is predicted
(`engine.training.fake_run.memory`) in the order of step time (`engine.predict.step_time`) until one fits. The bytes
that a policy saves are counted without a prediction, so candidates that cannot fit, or are certainly slower, are
skipped.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, RunConfig, Store
from engine.planning.checkpoint_policy import POLICIES_OF, checkpoint_kinds
from engine.planning.methods.presets import BYTES_OF, AttentionMethod
from engine.planning.topology import Topology
from engine.predict.machine import Machine
from engine.predict.memory import Capacity, Fit, MemoryPrediction, Predict
from engine.predict.policy_cost import PolicyCost, policy_cost
from engine.predict.step_time import predict_step
from engine.resolve.attention import circulate
from engine.resolve.decisions import Decision, Rule
from engine.resolve.degrees import sequence_topology
from engine.resolve.legality import legal_attention
from engine.runs.record import policy_name

# Step times closer than this share are a tie: the policy with the fewest moved bytes and tiles wins.
TIE_TOLERANCE = 0.01
MOST_GUESSES = 2  # of the number of layers that a policy offloads to the host
MOST_PREDICTED = 12  # candidates in a round, about a second each
LEAST_TILE_TOKENS = 1024
TILE_SHARE = 0.01  # of the device, for the intermediates of a tile
_POLICIES: tuple[dict[str, Any], ...] = (
    {"activation_checkpoint": "none"},
    {"activation_checkpoint": "attn_out"},
    *({"activation_checkpoint": "seq_fraction", "saved_fraction": share} for share in (0.75, 0.5, 0.25)),
    *({"activation_checkpoint": "attn_out_every", "every_layers": size} for size in (2, 4)),
    {"activation_checkpoint": "full"},
)


@dataclass(frozen=True)
class MemoryCandidate:
    """A memory policy, its costs, and its memory if that was predicted.

    step_s   seconds of a step; None: not predicted, since another candidate is certainly faster and may fit
    """

    memory: MemoryConfig
    cost: PolicyCost
    step_s: float | None = None
    prediction: MemoryPrediction | None = None
    fit: Fit | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the policy fits on the device and on the host; None: not predicted."""
        return None if self.fit is None else self.fit.fits

    @property
    def name(self) -> str:
        """The policy as text that names its settings."""
        return policy_name(self.memory)

    @property
    def settings(self) -> str:
        """The policy as overrides."""
        return " ".join(f"memory.{name}={value}" for name, value in self._settings().items() if value is not None)

    def _settings(self) -> dict[str, Any]:
        memory, kind = self.memory, self.memory.activation_checkpoint
        return {
            "activation_checkpoint": kind,
            "saved_fraction": memory.saved_fraction if kind == "seq_fraction" else None,
            "every_layers": memory.every_layers if kind == "attn_out_every" else None,
            "activation_store": memory.activation_store,
            "host_layers": memory.host_layers,
            "tile_tokens": memory.tile_tokens,
            "optimizer_store": memory.optimizer_store,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for tables and JSON; None where nothing was predicted."""
        found, cost = self.prediction, self.cost
        return {
            "name": self.name,
            **self._settings(),
            "device_peak_bytes": found and found.device_peak_bytes,
            "needed_bytes": found and found.needed_bytes,
            "host_peak_bytes": found and found.host_peak_bytes,
            "saved_bytes": cost.saved_bytes,
            "moved_bytes": cost.moved_bytes,
            "recompute_linear_flops": cost.linear_flops,
            "recompute_attention_flops": cost.attention_flops,
            "step_s": self.step_s,
            "fits": self.fits,
            "fits_device": self.fit and self.fit.device,
            "fits_host": self.fit and self.fit.host,
        }


@dataclass(frozen=True)
class MemoryChoice:
    """The memory policy of a run, and why; `candidates`: all candidates, the selected one first."""

    memory: MemoryConfig
    decision: Decision
    candidates: tuple[MemoryCandidate, ...] = ()

    @property
    def prediction(self) -> MemoryPrediction | None:
        """The predicted memory of the selected policy; None if it was configured."""
        return self.candidates[0].prediction if self.candidates else None

    @property
    def fits(self) -> bool:
        """Whether the selected policy fits; a configured one is assumed to."""
        return self.decision.rule != Rule.NEAREST_TO_FIT


def resolve_memory(
    config: RunConfig,
    world: Topology,
    machine: Machine,
    capacity: Capacity | None,
    predict: Predict | None,
) -> MemoryChoice:
    """Return the fastest memory policy that fits, else the one closest to fitting; a named policy is unchanged.

    This is the only search of `engine.resolve.run`: every candidate has its method, cost and step time, and some have a
    prediction of memory.

    Args:
        config: A configuration that names an attention preset.
        world: All ranks of the run.
        machine: Device and links for which step times are predicted.
        capacity: Memory of device and host; None: unknown.
        predict: Predicts the memory of a configuration with its method; None: no prediction is possible.

    Raises:
        ConfigError: No policy is legal, or capacity or prediction is missing.
        RunError: `predict` failed.
    """
    if config.memory.activation_checkpoint != "auto":
        return MemoryChoice(config.memory, Decision(_SETTING, policy_name(config.memory), Rule.CONFIGURED))
    if capacity is None or predict is None:
        raise ConfigError(
            "memory.activation_checkpoint=auto is resolved by `burst launch` before ranks start; start with it, or "
            "name a policy such as full or attn_out"
        )
    candidates = tuple(_Search(config, world, capacity, machine, predict).candidates())
    best = candidates[0]
    assert best.fit is not None
    rule = Rule.FASTEST_THAT_FITS if best.fit.fits else Rule.NEAREST_TO_FIT
    figures: dict[str, float] = {"headroom_bytes": best.fit.headroom_bytes}
    if best.step_s is not None:
        figures["step_s"] = best.step_s
    return MemoryChoice(best.memory, Decision(_SETTING, best.name, rule, figures, candidates), candidates)


_SETTING = "memory.activation_checkpoint"


class _Search:
    """The candidates of a run with resolved attention; their costs, methods, step times and predictions so far."""

    def __init__(
        self, config: RunConfig, world: Topology, capacity: Capacity, machine: Machine, predict: Predict
    ) -> None:
        self._config, self._world, self._capacity, self._machine = config, world, capacity, machine
        self._group, self._predict = sequence_topology(config, world), predict
        self._legal: list[MemoryConfig] = []  # of the rounds so far
        self._costs: dict[MemoryConfig, PolicyCost] = {}
        self._legal_methods: dict[tuple[object, float], AttentionMethod] = {}
        self._methods: dict[MemoryConfig, AttentionMethod] = {}
        self._seconds: dict[MemoryConfig, float] = {}
        self._predictions: dict[MemoryConfig, MemoryPrediction] = {}

    def candidates(self) -> list[MemoryCandidate]:
        """Return the best candidate, then untried ones by step time, then tried ones by headroom."""
        best = self._best()
        tried = sorted(self._predictions, key=lambda policy: -self._expected(policy).headroom_bytes)
        others = [policy for policy in map(self._placed, self._legal) if policy not in self._predictions]
        others.sort(key=lambda policy: (not self._expected(policy).fits, self._seconds.get(policy, math.inf)))
        return list(map(self._candidate, dict.fromkeys((best, *others, *tried))))

    def _candidate(self, memory: MemoryConfig) -> MemoryCandidate:
        found = self._predictions.get(memory)
        fit = None if found is None else self._capacity.fit(*found.needs)
        return MemoryCandidate(memory, self._cost(memory), self._seconds.get(memory), found, fit)

    def _best(self) -> MemoryConfig:
        """Return the fastest policy that fits, else the predicted one closest to fitting."""
        problems: list[str] = []
        found: MemoryConfig | None = None
        for memories in _rounds(self._config, self._world, self._capacity):
            if found is not None and not self._cost(found).recompute_flops + self._cost(found).moved_bytes:
                return found  # an optimizer on the host would not be faster
            legal = []
            for memory in memories:
                try:
                    self._cost(memory)
                    legal.append(memory)
                except ConfigError as error:  # tiles under tensor parallelism
                    problems += error.problems
            self._legal += legal
            # Full recomputation may have been excluded by the working set of other policies: judge it by its own.
            lean = [memory for memory in legal if memory.activation_checkpoint == "full"]
            found = self._first_that_fits(legal, than=found) or found or self._first_that_fits(lean, same_policy=True)
        if found is not None:
            return found
        if not self._legal:
            raise ConfigError(list(dict.fromkeys(problems)))
        if not self._predictions:
            placed = map(self._placed, self._legal)
            self._try(max(placed, key=lambda policy: self._capacity.fit(*self._cost(policy).least).headroom_bytes))
        return max(self._predictions, key=lambda policy: self._expected(policy).headroom_bytes)

    def _first_that_fits(
        self, memories: Sequence[MemoryConfig], *, than: MemoryConfig | None = None, same_policy: bool = False
    ) -> MemoryConfig | None:
        """Return the fastest policy that fits, if it is faster than `than`; `same_policy`: see `_expected`."""
        within_s = math.inf if than is None else self._step_s(than) * (1 - TIE_TOLERANCE)
        for _ in range(MOST_PREDICTED):
            placed = [self._placed(memory, same_policy=same_policy) for memory in memories]
            hopeful = [policy for policy in placed if self._expected(policy, same_policy=same_policy).fits]
            fastest = self._fastest(hopeful) if hopeful else None
            if fastest is None or self._step_s(fastest) > within_s:
                return None
            if self._try(fastest).fits:
                return fastest
        return None

    def _fastest(self, hopeful: Sequence[MemoryConfig]) -> MemoryConfig:
        """Return the policy with the shortest step; ties go to those without offloading and tiles."""
        costs = [self._cost(policy) for policy in hopeful]
        timed = [policy for policy in hopeful if not any(_is_faster(cost, self._cost(policy)) for cost in costs)]
        least_s = min(map(self._step_s, timed))

        def order(policy: MemoryConfig) -> tuple[float, ...]:
            step_s, is_on_host = self._step_s(policy), policy.activation_store == "host"
            later = (step_s - least_s) // (TIE_TOLERANCE * least_s)
            return later, is_on_host, policy.tile_tokens is not None, step_s, sum(self._cost(policy).least)

        return min(timed, key=order)

    def _step_s(self, memory: MemoryConfig) -> float:
        if memory not in self._seconds:
            config = replace(self._config, memory=memory)
            self._seconds[memory] = predict_step(config, self._method(memory), self._world, self._machine).seconds
        return self._seconds[memory]

    def _method(self, memory: MemoryConfig) -> AttentionMethod:
        """Return the attention method under this policy: recomputed attention may need another layout."""
        if memory not in self._methods:
            config, method = replace(self._config, memory=memory), self._legal_method(memory)
            self._methods[memory], _ = circulate(config, method, self._group, self._machine)
        return self._methods[memory]

    def _legal_method(self, memory: MemoryConfig) -> AttentionMethod:
        """Return the method before its moving operand is selected: costs of memory do not depend on that."""
        kinds = checkpoint_kinds(memory), memory.saved_fraction  # all that a method depends on
        if kinds not in self._legal_methods:
            config = replace(self._config, memory=memory)
            self._legal_methods[kinds] = legal_attention(config, self._group)
        return self._legal_methods[kinds]

    def _cost(self, memory: MemoryConfig) -> PolicyCost:
        """Return the cost of a policy. Raises ConfigError if the configuration cannot run with it."""
        if memory not in self._costs:
            config = replace(self._config, memory=memory)
            self._costs[memory] = policy_cost(config, self._legal_method(memory))
        return self._costs[memory]

    def _try(self, memory: MemoryConfig) -> Fit:
        if memory not in self._predictions:
            config = replace(self._config, memory=memory)
            self._predictions[memory] = self._predict(config, self._method(memory), self._world)
        return self._expected(memory)

    def _expected(self, memory: MemoryConfig, *, same_policy: bool = False) -> Fit:
        """Return the predicted fit; else an estimate from the working set of similar policies that were predicted.

        same_policy   estimate from predictions of the same policy alone, since others recompute different parts
        """

        def alike(policy: MemoryConfig) -> tuple[Any, ...]:
            kind = policy.activation_checkpoint
            return (
                kind if same_policy else kind == "none",
                policy.tile_tokens,
                policy.activation_store,
                policy.optimizer_store,
            )

        if memory in self._predictions:
            return self._capacity.fit(*self._predictions[memory].needs)
        like = [policy for policy in self._predictions if alike(policy) == alike(memory)]
        device, host = (
            least
            + max([0, *(self._predictions[policy].needs[index] - self._cost(policy).least[index] for policy in like)])
            for index, least in enumerate(self._cost(memory).least)
        )
        return self._capacity.fit(device, host)

    def _placed(self, memory: MemoryConfig, *, same_policy: bool = False) -> MemoryConfig:
        """Return the policy with the fewest layers on the host for which the others fit on the device.

        Unchanged if it offloads nothing, if offloading all layers is not enough, if `host_layers` is set, or if no
        layer needs to be on the host, which is a separate candidate. Also unchanged after MOST_GUESSES wrong guesses:
        the peak then hardly depends on the layers, and adding one at a time would use up all predictions.
        """

        def has_room(**changes: Any) -> bool:
            return self._expected(replace(memory, **changes), same_policy=same_policy).device

        guesses = sum(replace(policy, host_layers=None) == memory for policy in self._predictions)
        is_free = memory.activation_store == "host" and memory.host_layers is None and guesses < MOST_GUESSES
        if not is_free or self._legal_method(memory).chunk_store == "host":
            return memory
        if not has_room() or has_room(activation_store="device"):
            return memory
        counts = range(1, self._config.model.num_layers)
        index = bisect.bisect_left(counts, True, key=lambda count: has_room(host_layers=count))
        return replace(memory, host_layers=counts[index]) if index < len(counts) else memory


def _is_faster(policy: PolicyCost, other: PolicyCost) -> bool:
    """Return whether `policy` recomputes and moves no more than `other`, and less of something."""
    costs = [(cost.linear_flops, cost.attention_flops, cost.moved_bytes) for cost in (policy, other)]
    return costs[0] != costs[1] and all(less <= more for less, more in zip(*costs, strict=True))


def _rounds(config: RunConfig, world: Topology, capacity: Capacity) -> Iterator[list[MemoryConfig]]:
    """Yield policies with and without tiles; then with the optimizer on the host. Configured settings stay as they are.

    Host memory of unknown size is not used.
    """
    memory = replace(config.memory, checkpoint_layers=())
    has_host = capacity.host_bytes_per_node is not None and not capacity.host_is_device
    stores: tuple[Store, ...] = ("device", "host") if has_host else ("device",)
    if memory.activation_store is not None:
        stores = (memory.activation_store,)
    first = [
        replace(memory, **policy, activation_store=store, host_layers=memory.host_layers if store == "host" else None)
        for store in stores
        for policy in _POLICIES
        if policy["activation_checkpoint"] in POLICIES_OF[config.model.implementation]
    ]
    rows = config.train.seq_len // sequence_topology(config, world).size
    tile_tokens = _tile_tokens(config, rows, capacity)
    tiled = [replace(policy, tile_tokens=tile_tokens) for policy in first]
    tileable = memory.tile_tokens is None and config.attention.chunk_tokens is None and rows > tile_tokens
    tileable = tileable and config.model.implementation == "burst"
    yield [*first, *tiled] if tileable else first
    if memory.optimizer_store == "device" and has_host:
        yield [replace(policy, optimizer_store="host") for policy in (tiled if tileable else first)]


def _tile_tokens(config: RunConfig, rows: int, capacity: Capacity) -> int:
    """Return the rows of a tile: at least the width of the layer's matrices, for fast products; more if memory allows.

    Larger tiles are faster because each adds its gradients to those of all weights. The limits are an eighth of the
    rows, and a small share of the device (TILE_SHARE) for gate, up, their product and the gradients of these.
    """
    model = config.model
    row_bytes = 6 * model.ffn_hidden_size * BYTES_OF[config.train.compute_dtype]
    tile_tokens = max(LEAST_TILE_TOKENS, model.hidden_size)
    while 16 * tile_tokens <= rows and 2 * tile_tokens * row_bytes <= TILE_SHARE * capacity.device_bytes:
        tile_tokens *= 2
    return tile_tokens
