"""Recommend a change of a run: alternatives are predicted, and the best one that fits is reported. No torch.

Changes are compared by device seconds per token, the cost of a run on devices paid by the hour: a faster method and
fewer ranks are comparable in this unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MemoryConfig, RunConfig
from engine.planning.topology import Topology
from engine.predict.flops import StepTime
from engine.predict.machine import Machine
from engine.predict.memory import Capacity, MemoryPrediction, Predict
from engine.predict.policy_cost import policy_cost, rank_parameters, rank_trained, state_bytes
from engine.predict.step_time import predict_step
from engine.resolve.attention import rank_methods, resolve_attention
from engine.resolve.degrees import sequence_topology, tensor_parallel_problems
from engine.resolve.legality import method_on
from engine.resolve.memory import MemoryChoice, resolve_memory

LEAST_SAVING = 0.02  # smaller ones are within the error of predictions
MOST_TIMES = 16  # largest factor by which ranks grow or tokens shrink
_NODE_RANKS = 8
_GIB = 2**30
_AMPLE_HOST_BYTES = 4096 * _GIB  # of the largest servers


@dataclass(frozen=True)
class Recommendation:
    """A change of method, memory policy or ranks, as overrides; `saving`: share of device seconds per token."""

    change: str
    step: StepTime
    saving: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"change": self.change, "saving": self.saving, "step_time": self.step.to_dict()}


@dataclass(frozen=True)
class _Option:
    """An alternative run; if its memory policy is open, the reported change names the resolved policy."""

    change: str
    config: RunConfig
    world: Topology


@dataclass(frozen=True)
class Adviser:
    """Recommends changes for given machines and memory."""

    capacity: Capacity
    machine: Machine
    predict: Predict

    def recommend(self, requested: RunConfig, resolved: RunConfig, world: Topology) -> Recommendation | None:
        """Return the change with the largest saving that fits; None: no change saves LEAST_SAVING.

        requested   the configuration as given, including `auto` settings
        resolved    the resolved configuration
        """
        now_s = self._step(resolved, world).device_s_per_token
        best: Recommendation | None = None
        hopeful = [(self._saving(option, now_s), option) for option in self._options(requested, resolved, world)]
        for most, option in sorted(hopeful, key=lambda pair: -pair[0]):
            if most < LEAST_SAVING or (best is not None and best.saving >= most):
                break
            found = self._resolved(option, now_s)
            if found is not None and found.saving >= max(LEAST_SAVING, best.saving if best else 0.0):
                best = found
        return best

    def _saving(self, option: _Option, now_s: float) -> float:
        """Return an upper bound of the saving: an open policy might save all activations."""
        config = option.config
        if config.memory.activation_checkpoint == "auto":
            config = replace(config, memory=replace(config.memory, activation_checkpoint="none"))
        try:
            return 1 - self._step(config, option.world).device_s_per_token / now_s
        except ConfigError:  # these ranks cannot divide the run
            return 0.0

    def _resolved(self, option: _Option, now_s: float) -> Recommendation | None:
        """Return the option with its best policy that fits, and its actual saving; None: no policy fits."""
        config, world = option.config, option.world
        capacity = replace(self.capacity, local_ranks=world.local_ranks)
        try:
            choice = resolve_memory(config, world, self.machine, capacity, self.predict)
            config = replace(config, memory=choice.memory)
            prediction = choice.prediction or self._memory(config, world)
        except ConfigError:
            return None
        if not capacity.fit(*prediction.needs).fits:
            return None
        step = self._step(config, world)
        change = option.change or choice.candidates[0].settings
        return Recommendation(change, step, 1 - step.device_s_per_token / now_s)

    def _step(self, config: RunConfig, world: Topology) -> StepTime:
        machine = self.machine.shared_by(world.local_ranks)
        method = resolve_attention(config, sequence_topology(config, world), machine)
        return predict_step(config, method, world, machine)

    def _memory(self, config: RunConfig, world: Topology) -> MemoryPrediction:
        method = resolve_attention(config, sequence_topology(config, world), self.machine)
        return self.predict(config, method, world)

    def remedies(self, config: RunConfig, world: Topology) -> list[str]:
        """Return one sentence per predicted change that makes a run fit.

        Another policy; else more ranks, tensor parallelism, 8-bit moments or a shorter sequence, each with the policy
        closest to fitting.
        """
        opened = replace(config, memory=_open(config.memory))
        choice = resolve_memory(opened, world, self.machine, self.capacity, self.predict)
        best = choice.candidates[0]
        if choice.fits and choice.prediction is not None:
            needs = f"{choice.prediction.needed_bytes / 2**30:.3g} GiB on the device"
            return [f"memory=auto would fit with {needs}, at {best.step_s:.3g} s a step: {best.settings}"]
        nearest = replace(config, memory=choice.memory)
        on_host = self._host_memory(config, world)
        found = [] if on_host is None else [on_host]
        directions = [self._more_ranks(nearest, world), _more_tp(nearest, world), _small_moments(nearest, world)]
        too_large = self._smaller_model(nearest, world)
        directions += [] if too_large else [_shorter_sequences(nearest, world)]
        first = (next(filter(self._fits, options), None) for options in directions)
        found += [f"{option.change}, with {best.name}" for option in first if option is not None]
        return found + ([too_large] if too_large and on_host is None else [])

    def _host_memory(self, config: RunConfig, world: Topology) -> str | None:
        """Return a sentence about what would fit with more (or with unknown) host memory; None: nothing would.

        The optimizer is on the host, updated inside backward if only that helps, with the longest halved sequence that
        fits by prediction.
        """
        if self.capacity.host_is_device:
            return None
        ample = replace(self, capacity=replace(self.capacity, host_bytes_per_node=_AMPLE_HOST_BYTES))
        for in_backward in (False, True):
            changed = _on_host(config, in_backward=in_backward)
            for option in (_Option("", changed, world), *_shorter_sequences(changed, world)):
                trial = option.config
                trial = replace(trial, memory=replace(_open(trial.memory), activation_checkpoint="auto"))
                try:
                    choice = resolve_memory(trial, world, self.machine, ample.capacity, self.predict)
                except ConfigError:
                    break
                if choice.fits and choice.prediction is not None:
                    seq_len = trial.train.seq_len
                    return _host_words(config, choice, world, seq_len, in_backward=in_backward)
        return None

    def _fits(self, option: _Option) -> bool:
        """Return whether the option fits; one that cannot run, or saves too much, is not predicted."""
        config, world = option.config, option.world
        capacity = replace(self.capacity, local_ranks=world.local_ranks)
        try:
            least = policy_cost(config, method_on(config, world)).least
            return capacity.fit(*least).fits and capacity.fit(*self._memory(config, world).needs).fits
        except ConfigError:
            return False

    def _more_ranks(self, config: RunConfig, world: Topology) -> Iterator[_Option]:
        """Yield doubled numbers of ranks that share the sequence; ranks of a CPU share the node's memory."""
        larger = _doubled(world, fills_node=not self.capacity.host_is_device)
        while larger.size <= MOST_TIMES * world.size:
            changed = with_ranks(config, world, larger)
            share = f"{-(-config.train.seq_len // sequence_topology(changed, larger).size):,}"
            nodes = f" ({larger.nodes} nodes of {larger.local_ranks})" if larger.nodes > 1 else ""
            text = f"{larger.size} ranks{nodes} instead of {world.size} would fit: each then holds {share} tokens"
            yield _Option(text, changed, larger)
            larger = _doubled(larger, fills_node=not self.capacity.host_is_device)

    def _smaller_model(self, config: RunConfig, world: Topology) -> str | None:
        """Return a sentence if the model's states alone leave no memory for a single token; else None."""
        method = method_on(config, world)
        states = state_bytes(config.memory, rank_parameters(config, method), rank_trained(config, method))
        on_device = config.memory.optimizer_store == "device" or self.capacity.host_is_device
        if not on_device or states <= self.capacity.device_bytes:
            return None
        return (
            f"a smaller model: weights, gradients and optimizer states alone take {states / 2**30:.3g} GiB of a rank, "
            "for any train.seq_len"
        )

    def _options(self, requested: RunConfig, resolved: RunConfig, world: Topology) -> Iterator[_Option]:
        if requested.attention.preset != "auto":
            try:
                best = rank_methods(resolved, sequence_topology(resolved, world), self.machine)[0].attention
                yield _Option(_changes(resolved.attention, best), replace(resolved, attention=best), world)
            except ConfigError:
                pass
        if requested.memory.activation_checkpoint != "auto":
            yield _Option("", replace(resolved, memory=_open(resolved.memory)), world)
        if not self.capacity.host_is_device:  # more ranks add no cores
            cost = policy_cost(resolved, method_on(resolved, world))
            for other in _other_ranks(world, more=cost.recompute_flops + cost.moved_bytes > 0):
                nodes = f" --nodes {other.nodes}" if max(other.nodes, world.nodes) > 1 else ""
                config = replace(with_ranks(resolved, world, other), memory=requested.memory)
                yield _Option(f"--ranks {other.size}{nodes}", config, other)


def _on_host(config: RunConfig, *, in_backward: bool) -> RunConfig:
    """Return the run with its optimizer on the host; in_backward: each layer is updated inside backward."""
    memory = replace(
        config.memory, optimizer_store="host", optimizer_in_backward=in_backward or config.memory.optimizer_in_backward
    )
    if not in_backward:
        return replace(config, memory=memory)
    optimizer = replace(config.optimizer, max_grad_norm=None)
    return replace(config, memory=memory, optimizer=optimizer, train=replace(config.train, grad_accum_steps=1))


def _host_words(config: RunConfig, choice: MemoryChoice, world: Topology, seq_len: int, *, in_backward: bool) -> str:
    """Return the overrides to type, and the host memory that they need."""
    assert choice.prediction is not None
    node_bytes = choice.prediction.host_peak_bytes * world.local_ranks
    host = -(-node_bytes // _GIB)
    words = [f"memory.host_bytes={host * _GIB}", choice.candidates[0].settings, "memory.optimizer_store=host"]
    if in_backward:
        words += ["memory.optimizer_in_backward=true", "optimizer.max_grad_norm=null"]
        words += ["train.grad_accum_steps=1"] if config.train.grad_accum_steps > 1 else []
    if seq_len != config.train.seq_len:
        words.append(f"train.seq_len={seq_len}")
    typed = " ".join(dict.fromkeys(" ".join(words).split()))
    seconds = f"{choice.candidates[0].step_s:.3g} s a step"
    return f"{host} GiB or more of host memory per node would be enough: {typed}; {seconds}"


def _changes(before: AttentionConfig, after: AttentionConfig) -> str:
    """Return the differing settings as overrides."""
    old, new = asdict(before), asdict(after)
    names = [name for name in new if new[name] != old[name]]
    return " ".join(f"attention{'' if name == 'preset' else f'.{name}'}={new[name]}" for name in names)


def _open(memory: MemoryConfig) -> MemoryConfig:
    """Return the memory settings with an open policy, store and tiles; those of the optimizer are unchanged."""
    plain = MemoryConfig()
    return replace(
        memory, activation_checkpoint="auto", checkpoint_layers=(), activation_store=None, host_layers=None,
        tile_tokens=None, saved_fraction=plain.saved_fraction, every_layers=plain.every_layers,
    )  # fmt: skip


def _other_ranks(world: Topology, *, more: bool) -> Iterator[Topology]:
    """Yield half the ranks and, if a policy could then save `more`, twice the ranks."""
    nodes, local_ranks = world.nodes, world.local_ranks
    if nodes % 2 == 0:
        yield Topology(nodes // 2, local_ranks)
    elif nodes == 1 and local_ranks % 2 == 0:
        yield Topology(1, local_ranks // 2)
    if more:
        yield _doubled(world, fills_node=True)


def _doubled(world: Topology, *, fills_node: bool) -> Topology:
    """Return twice the nodes; for a single node, if `fills_node`, twice the ranks up to eight."""
    fills_node = fills_node and world.nodes == 1 and 2 * world.local_ranks <= _NODE_RANKS
    return Topology(1, 2 * world.local_ranks) if fills_node else Topology(2 * world.nodes, world.local_ranks)


def _more_tp(config: RunConfig, world: Topology) -> Iterator[_Option]:
    """Yield higher tensor parallel degrees inside a node, on the same ranks."""
    for size in (2, 4, 8):
        if size > config.parallel.tp_size and world.local_ranks % size == 0:
            changed = replace(
                config,
                attention=without_shape(config.attention),
                parallel=replace(config.parallel, tp_size=size, cp_size=None),
                memory=replace(config.memory, tile_tokens=None),
            )
            if not list(tensor_parallel_problems(config.model, size)):
                yield _Option(
                    f"parallel.tp_size={size} parallel.cp_size=null would fit on the same ranks", changed, world
                )


def _small_moments(config: RunConfig, world: Topology) -> Iterator[_Option]:
    if config.memory.moments_dtype != "int8":
        changed = replace(config, memory=replace(config.memory, moments_dtype="int8"))
        yield _Option("memory.moments_dtype=int8 would fit on the same ranks", changed, world)


def _shorter_sequences(config: RunConfig, world: Topology) -> Iterator[_Option]:
    """Yield half of the sequence length, a quarter, and so on."""
    tokens = config.train.seq_len // 2
    while tokens and MOST_TIMES * tokens >= config.train.seq_len:
        changed = replace(config, train=replace(config.train, seq_len=tokens))
        yield _Option(f"train.seq_len={tokens} would fit on the same ranks", changed, world)
        tokens //= 2


def with_ranks(config: RunConfig, world: Topology, larger: Topology) -> RunConfig:
    """Return the same run on more ranks, all of which share the sequence."""
    parallel = config.parallel
    if parallel.cp_size is not None:
        cp_size = parallel.cp_size * larger.size // world.size
        parallel = replace(parallel, cp_size=cp_size)
    attention = without_shape(config.attention)
    attention = replace(attention, preset="burst") if attention.preset == "single" else attention
    return replace(config, parallel=parallel, attention=attention)


def without_shape(attention: AttentionConfig) -> AttentionConfig:
    """Return the settings without degrees, which would be illegal on other ranks: the preset's shape applies."""
    return replace(attention, head_parallel_size=None, ring_inner_size=None, ring_outer_size=None)
