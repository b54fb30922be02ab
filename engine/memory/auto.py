"""memory=auto: the fastest checkpoint policy that fits, and the table it was chosen from. No torch.

Every policy is tried with its checkpoints on the device and in host memory, with projections and MLP whole and in
tiles; if none fits, with the optimizer on the host. Memory is the closed form's, with a margin for its error, and the
chosen one may be verified by the exact prediction, which the caller passes in. Seconds are what a policy adds to the
step: what it computes again at the machine's rates, and what of its copies compute cannot hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.config.errors import ConfigError
from engine.config.settings import MemoryConfig, RunConfig, Store
from engine.memory.candidate import MARGIN, MemoryCandidate, Scope
from engine.memory.capacity import Capacity
from engine.memory.fit import Predict, advise, fit_of, sequence_topology, too_large_model
from engine.memory.host_layers import other_host_layers, with_fewest_on_host
from engine.planning.methods.auto import Choice, machine_of, settle_auto
from engine.planning.methods.topology import Topology
from engine.planning.time.machine import Machine
from engine.planning.time.step_time import plain_step_seconds

# Nearer than this share of a step, times say nothing: then the policy is taken that moves and divides least.
INDIFFERENCE = 0.01
MOST_VERIFIED = 4  # candidates that are predicted exactly, some seconds each
KEPT_FRACTIONS = (0.75, 0.5, 0.25)
GROUP_SIZES = (2, 4, 8)
LEAST_TILE_TOKENS = 1024


@dataclass(frozen=True)
class MemoryChoice:
    """The configuration with the best policy in place of auto, and all candidates: those that fit, fastest first.

    fits     False: the configuration is that of the candidate that lacks least, and `advice` says what would help
    """

    config: RunConfig
    candidates: tuple[MemoryCandidate, ...]
    reason: str
    fits: bool = True
    advice: tuple[str, ...] = ()

    def require(self) -> RunConfig:
        """The configuration; raises ConfigError with reason and advice when no candidate fits."""
        if not self.fits:
            raise ConfigError([f"memory.activation_checkpoint=auto: {self.reason}", *self.advice])
        return self.config


def settle_run(
    config: RunConfig,
    world: Topology,
    capacity: Capacity,
    machine: Machine | None = None,
    verify: Predict | None = None,
) -> tuple[Choice, MemoryChoice]:
    """First attention=auto, then memory=auto, on the ranks of `world`; what names its method or policy is kept."""
    attention = settle_auto(config, sequence_topology(config, world), machine)
    return attention, settle_memory(attention.config, world, capacity, machine, verify)


def settle_memory(
    config: RunConfig,
    world: Topology,
    capacity: Capacity,
    machine: Machine | None = None,
    verify: Predict | None = None,
) -> MemoryChoice:
    """The fastest policy that fits on the ranks of `world`; a config that names its policy is kept.

    A pure function of its arguments: ranks that agree on the capacity agree on the policy. `attention=auto` must have
    been settled. `verify` predicts exactly; a candidate that it refutes is passed over.
    """
    if config.memory.activation_checkpoint != "auto":
        return MemoryChoice(config, (), "as configured")
    scope = Scope(config, world, capacity, machine or machine_of(config, capacity.device_name))
    candidates, best = _verified(_first_round_that_fits(scope), scope, verify)
    chosen = replace(config, memory=best.memory)
    if best.fits:
        return MemoryChoice(chosen, candidates, _reason(best, candidates, capacity))
    missing = -best.fit.headroom_bytes / 1e9
    reason = f"no policy fits on {capacity.device_name}; the nearest, {best.name}, lacks {missing:.3g} GB"
    advice = [f"{text}, under memory=auto" for text in advise(chosen, world, capacity, MARGIN)]
    too_large = too_large_model(chosen, world, capacity)
    advice += [] if too_large is None else [too_large]
    if capacity.host_bytes_per_node is None:
        advice.insert(
            0, "memory.host_bytes=BYTES (of a node, now unknown) would let checkpoints and optimizer lie there"
        )
    return MemoryChoice(chosen, candidates, reason, fits=False, advice=tuple(advice))


def advice_for(config: RunConfig, world: Topology, capacity: Capacity, machine: Machine | None = None) -> list[str]:
    """What would make a configuration fit that does not: another policy, else ranks, tensor parallelism, length."""
    free = MemoryConfig(
        activation_checkpoint="auto", device_bytes=config.memory.device_bytes, host_bytes=config.memory.host_bytes
    )
    choice = settle_memory(replace(config, memory=free), world, capacity, machine)
    if choice.fits:
        best = choice.candidates[0]
        needs = f"{best.estimate.needed_bytes / 1e9:.3g} GB on the device"
        return [f"memory=auto would fit with {needs}, {best.extra_s:.3g} s more per step: {best.settings}"]
    return list(choice.advice)


def _first_round_that_fits(scope: Scope) -> tuple[MemoryCandidate, ...]:
    """Candidates of all rounds up to the first in which one fits; those that fit first, the fastest of them first."""
    found: list[MemoryCandidate] = []
    problems: list[str] = []
    for memories in _rounds(scope.config, scope.world, scope.capacity):
        for memory in memories:
            try:
                found.append(with_fewest_on_host(scope.estimated(memory), scope))
            except ConfigError as error:  # tiles under tensor parallelism
                problems += error.problems
        if any(candidate.fits for candidate in found):
            break
    if not found:
        raise ConfigError(list(dict.fromkeys(problems)))
    return _ordered(found, INDIFFERENCE * plain_step_seconds(scope.config, scope.world, scope.machine))


def _ordered(found: Sequence[MemoryCandidate], alike_s: float) -> tuple[MemoryCandidate, ...]:
    """Those that fit first, by time; of those alike first what moves nothing and is whole. Then by what is missing."""
    least = min((candidate.extra_s for candidate in found if candidate.fits), default=0.0)

    def order(candidate: MemoryCandidate) -> tuple[float, ...]:
        memory, needed = candidate.memory, candidate.estimate.needed_bytes
        if not candidate.fits:
            return 1, -candidate.fit.headroom_bytes, needed
        slower = (candidate.extra_s - least) // alike_s
        is_on_host, is_tiled = memory.activation_store == "host", memory.tile_tokens is not None
        return 0, slower, is_on_host, is_tiled, candidate.extra_s, needed

    return tuple(sorted(found, key=order))


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
    tile_tokens = max(LEAST_TILE_TOKENS, config.model.hidden_size)
    tiled = [replace(policy, tile_tokens=tile_tokens) for policy in first]
    tileable = memory.tile_tokens is None and config.attention.chunk_tokens is None and rows > tile_tokens
    yield [*first, *tiled] if tileable else first
    if memory.optimizer_store == "device" and has_host:
        yield [replace(policy, optimizer_store="host") for policy in (tiled if tileable else first)]


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


def _verified(
    candidates: Sequence[MemoryCandidate], scope: Scope, verify: Predict | None
) -> tuple[tuple[MemoryCandidate, ...], MemoryCandidate]:
    """(all candidates, the first that fits): predicted exactly, one after another, until one does.

    When none fits with the margin the nearest is tried all the same: the margin may be all that is missing. Where only
    layers lie in the wrong place, they are moved.
    """
    checked = list(candidates)
    if verify is None:
        return tuple(checked), checked[0]
    error, left = 0.0, [index for index, candidate in enumerate(checked) if candidate.fits] or [0]
    tried: list[MemoryCandidate] = []
    while left and len(tried) < MOST_VERIFIED:
        index = _next_to_verify(left, checked, scope.capacity, error)
        checked[index] = scope.predicted(checked[index], verify)
        error = max(error, checked[index].closed_form_error)
        if checked[index].fits:
            return tuple(checked), checked[index]
        tried.append(checked[index])
        other = other_host_layers(checked[index], scope)
        if other is None:
            left.remove(index)
        else:
            checked[index] = scope.estimated(replace(checked[index].memory, host_layers=other))
    return tuple(checked), max(tried, key=lambda candidate: candidate.fit.headroom_bytes)


def _next_to_verify(left: list[int], candidates: list[MemoryCandidate], capacity: Capacity, error: float) -> int:
    """The fastest that would fit if the closed form missed as much of it as of others; else the least in need."""
    hopeful = [index for index in left if fit_of(candidates[index].estimate, capacity, error).fits]
    return hopeful[0] if hopeful else max(left, key=lambda index: candidates[index].fit.headroom_bytes)


def _reason(best: MemoryCandidate, candidates: Sequence[MemoryCandidate], capacity: Capacity) -> str:
    fitting = sum(candidate.fits for candidate in candidates)
    free = fit_of(best.prediction or best.estimate, capacity).headroom_bytes
    return (
        f"auto: {best.name} adds {best.extra_s:.3g} s to a step; of the {fitting} that fit among {len(candidates)} "
        f"none saves more than {INDIFFERENCE:.0%} of a step; it leaves {free / 1e9:.3g} GB free"
    )
