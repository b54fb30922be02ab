"""Memory of one rank in closed form, component by component: for intuition, for memory=auto, and in no time at all.

    parameters    4 Phi / (z tp)      fp32 master weights, divided over z = dp_shard x cp ranks
    gradients     4 Phi / (z tp)      fp32, of layers whose backward is done; one layer's own, not yet divided
    optimizer     8 Phi / (z tp)      AdamW's two moments in fp32 (2 with a scale per 256 in int8)
    checkpoints   engine.memory.kept  by policy
    attention     3 (d + 2 K D) T and 2 to 4 travelling blocks: engine.memory.attention_buffers
    communication gathered weights of two layers, and one layer's fp32 gradients on their way out
    mlp           5 f and 4 d of a tile
    loss          a chunk of logits, on a CPU its fp32 softmax; weight gradient of the head
    embedding     its gradient
    other         the residual stream and its gradient, rotary tables, token ids

Sources: Rajbhandari et al. 2020 (ZeRO: 16 bytes per parameter), Korthikanti et al. 2022 (activations), and the engine's
own order of work. The peak is the largest sum over the moments of a step, not the sum of the components' peaks: all
checkpoints exist before any gradient, all gradients after the last checkpoint. `engine.memory.predict` runs the real
step instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config.settings import RunConfig
from engine.memory.attention_buffers import attention_bytes
from engine.memory.kept import PolicyCost, layers_on_host, policy_cost
from engine.memory.reserve import reserve_bytes
from engine.memory.shapes import UNITS_ON_HOST, WIDE_BYTES, RankShape, rank_shape
from engine.planning.methods.presets import AttentionMethod

COMPONENTS = (
    "parameters",
    "gradients",
    "optimizer",
    "checkpoints",
    "attention",
    "communication",
    "mlp",
    "loss",
    "embedding",
    "other",
)
# fp32 softmax of the loss on a CPU, in numbers: engine.row_blocks, of which two live at once. A GPU's kernel has none.
_LOSS_BLOCK = 2**19
_INT8_SCALE_BLOCK = 256


@dataclass(frozen=True)
class Moment:
    """Bytes by component at one moment of a step."""

    phase: str
    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """On the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """In host memory."""
        return sum(self.host.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Closed-form peak of one rank; `components` is {"device": {name: bytes}, "host": {...}} at the two peaks.

    reserve_bytes    on CUDA, besides: context, communicators, fragmentation (`engine.memory.reserve`)
    """

    device_peak_bytes: int
    host_peak_bytes: int
    phase: str
    components: Mapping[str, Mapping[str, int]]
    reserve_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """Device memory that a GPU must have free."""
        return self.device_peak_bytes + self.reserve_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "device_peak_bytes": self.device_peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "reserve_bytes": self.reserve_bytes,
            "needed_bytes": self.needed_bytes,
            "phase": self.phase,
            "components": {place: dict(sizes) for place, sizes in self.components.items()},
        }


def estimate_memory(config: RunConfig, method: AttentionMethod, cost: PolicyCost | None = None) -> MemoryEstimate:
    """Peak of the rank that needs most, in a step that is not the first (the optimizer has its state).

    cost    `policy_cost(config, method)`, if the caller has it. Raises ConfigError as `rank_shape`.
    """
    step = _Step(config, method, cost or policy_cost(config, method))
    moments = list(step.moments())
    peak = max(moments, key=lambda moment: moment.device_bytes)
    host = max(moments, key=lambda moment: moment.host_bytes)
    components = {
        "device": {name: peak.device.get(name, 0) for name in COMPONENTS},
        "host": {name: host.host.get(name, 0) for name in COMPONENTS},
    }
    parallel = config.parallel
    world_size = method.cp_size * parallel.dp_shard_size * parallel.dp_replicate_size * parallel.tp_size
    on_cpu = config.cluster.backend == "gloo"
    reserve = 0 if on_cpu else reserve_bytes(parallel, method, world_size, peak.device_bytes)
    return MemoryEstimate(peak.device_bytes, host.host_bytes, peak.phase, components, reserve)


class _Step:
    """One optimizer step of one rank as the moments at which its memory can be largest."""

    def __init__(self, config: RunConfig, method: AttentionMethod, cost: PolicyCost) -> None:
        self._config = config
        self._shape = rank_shape(config, method)
        self._attention = attention_bytes(self._shape, method)
        self._cost = cost
        self._layers_on_host = layers_on_host(config, method)
        self._states_on_host = config.memory.optimizer_store == "host"

    def moments(self) -> Iterator[Moment]:
        """Loss, every layer's backward pass from the last to the first, embedding, optimizer."""
        layers = len(self._cost.layers)
        yield self._moment("loss", layers, self._loss_forward())
        yield self._moment("loss", layers, self._loss_backward())
        for index in reversed(range(layers)):
            for parts in self._layer_backward(index):
                yield self._moment("backward", index + 1, parts)
        yield self._moment("backward", 0, self._embedding_backward())
        yield self._moment("optimizer", 0, {})

    def _moment(self, phase: str, layers_left: int, parts: Mapping[str, int]) -> Moment:
        """What lives all through a step, the checkpoints of the layers whose backward is to come, and `parts`."""
        device, host = self._states(layers_left, done=phase == "optimizer")
        kept = [layer.kept_bytes for layer in self._cost.layers[:layers_left]]
        on_host, on_device = kept[: self._layers_on_host], kept[self._layers_on_host :]
        host["checkpoints"] = sum(on_host)
        # Of those on the host the one in use and the next that is being fetched, before that the last two stored.
        device["checkpoints"] = sum(on_device) + sum(sorted(on_host)[-2:])
        device["attention"] = self._attention.working
        device["other"] = self._tables()
        for name, size in parts.items():
            device[name] = device.get(name, 0) + size
        if self._attention.on_host and phase == "backward":
            host["attention"] = self._attention.inputs + self._attention.gradients + self._shape.result_bytes
        return Moment(phase, device, host)

    def _states(self, layers_left: int, *, done: bool) -> tuple[dict[str, int], dict[str, int]]:
        """(device, host) of parameters, finished gradients and optimizer: 4 + 4 + 8 bytes, divided over z ranks."""
        shape, memory = self._shape, self._config.memory
        tied = self._config.model.tie_embeddings
        ends = shape.vocab_numbers * (1 if tied else 2)
        total = self._layers_numbers(len(self._cost.layers)) + ends
        finished = total - self._layers_numbers(layers_left) - (0 if done or tied else shape.vocab_numbers)
        if memory.optimizer_in_backward:
            staged = UNITS_ON_HOST if self._states_on_host else 0  # on the device each is used and freed at once
            finished = min(finished, staged * shape.layer_numbers)
        gradients = WIDE_BYTES * finished // shape.shards
        if self._config.train.grad_accum_steps > 1:  # those of the micro-steps before are there
            gradients = WIDE_BYTES * total // shape.shards
        state_bytes = 2.0 * WIDE_BYTES
        if memory.moments_dtype == "int8":
            state_bytes = 2 * (1 + WIDE_BYTES / _INT8_SCALE_BLOCK)
        states = {
            "parameters": WIDE_BYTES * total // shape.shards,
            "gradients": gradients,
            "optimizer": round(state_bytes * total / shape.shards),
        }
        return ({}, states) if self._states_on_host else (states, {})

    def _layers_numbers(self, count: int) -> int:
        return count * self._shape.layer_numbers

    def _tables(self) -> int:
        """cos and sin in fp32, [T, D / 2] each; token ids, positions and labels in int64."""
        shape, model = self._shape, self._config.model
        rows = shape.rows // self._config.train.micro_batch_size
        return rows * model.head_dim * 4 + 3 * 8 * shape.rows

    def _gathered(self, units: int = 2) -> int:
        """Whole weights of `units` layers: the one that works and the one fetched ahead; all, if none is freed."""
        count = units if self._config.parallel.reshard_after_forward else len(self._cost.layers)
        return count * self._shape.layer_numbers * self._shape.element_bytes

    def _reduced(self, numbers: int) -> int:
        """fp32 copy in which one unit's gradients are summed over ranks; alone there is nothing to sum."""
        return WIDE_BYTES * numbers if self._shape.shards > 1 else 0

    def _loss_forward(self) -> dict[str, int]:
        """A chunk's logits (and fp32 softmax), the head's gradient in fp32, its weight; three hiddens."""
        shape, loss = self._shape, self._config.loss
        chunk = shape.vocab * min(loss.chunk_tokens, shape.rows)
        block = min(chunk, _LOSS_BLOCK) if self._config.cluster.backend == "gloo" else 0
        softmax = 2 * WIDE_BYTES * block
        weight = shape.vocab_numbers * (WIDE_BYTES + shape.element_bytes)
        return {"loss": chunk * shape.element_bytes + softmax + weight, "other": 3 * shape.hidden_bytes}

    def _loss_backward(self) -> dict[str, int]:
        """The head's gradient in fp32, in the compute dtype and as it is summed; its weight; gradients of hidden."""
        shape = self._shape
        weight = shape.vocab_numbers * (WIDE_BYTES + 2 * shape.element_bytes) + self._reduced(shape.vocab_numbers)
        return {"loss": weight, "other": 4 * shape.hidden_bytes, "communication": self._gathered(1)}

    def _embedding_backward(self) -> dict[str, int]:
        """Gradient in the compute dtype and as it is summed, the gathered weight, dy."""
        shape = self._shape
        weight = 2 * shape.vocab_numbers * shape.element_bytes + self._reduced(shape.vocab_numbers)
        return {"embedding": weight, "other": shape.hidden_bytes, "communication": self._reduced(shape.layer_numbers)}

    def _layer_backward(self, index: int) -> list[dict[str, int]]:
        """The moments of one layer: through the MLP, through attention, through the projections."""
        common = {
            "communication": self._gathered() + self._reduced(self._shape.layer_numbers),
            "other": 2 * self._shape.hidden_bytes,  # dy and dx
        }
        policy = self._cost.layers[index].policy
        if policy.kind == "none" and self._cost.layers[index].linear_flops == 0:
            moments = self._graph_backward()
        else:
            moments = self._recomputed_backward(index)
        return [{**common, **moment, "other": common["other"] + moment.get("other", 0)} for moment in moments]

    def _graph_backward(self) -> list[dict[str, int]]:
        """Policy none: only gradients are made; gate, up and their product are freed before attention's turn."""
        shape, attention = self._shape, self._attention
        gradients = {"gradients": shape.element_bytes * shape.layer_numbers}
        wide = shape.rows * shape.ffn * shape.element_bytes
        through_mlp = {**gradients, "mlp": 2 * wide + 2 * shape.hidden_bytes}  # dact, dgate, dup, less the product
        through_attention = {**gradients, "checkpoints": -3 * wide, "attention": attention.gradients}
        return [through_mlp, through_attention]

    def _recomputed_backward(self, index: int) -> list[dict[str, int]]:
        """All other policies (engine.model.checkpointed): attention's inputs are made again, then the rest by tiles."""
        shape, attention, layer = self._shape, self._attention, self._cost.layers[index]
        tile = shape.tile_rows * shape.element_bytes
        own = self._inputs_of_group(index)
        whole = attention.inputs + _made_again(layer.kept_bytes, layer.policy.keeps_input, shape)
        results = 0 if attention.on_host else whole
        # Sums over tiles in fp32 and one tile's gradients in the compute dtype; of one tile the latter only.
        sums = WIDE_BYTES if shape.tile_rows < shape.rows else 0
        gradients = (sums + shape.element_bytes) * shape.layer_numbers
        # dout as the MLP leaves it, as attention takes it with its statistics (qx is q and dout together), and results
        # in fp32 before they are cast.
        dout = 0 if attention.on_host else 2 * shape.result_bytes + attention.accumulated
        # gate, up, dproduct, dgate and dup; norm, stream, and their gradients
        mlp = tile * (5 * shape.ffn + 4 * shape.hidden)
        # gradients with those of one kernel call, before they are added
        flowing = 0 if attention.on_host else results + attention.gradients + shape.qkv_bytes
        # dq, dk, dv cast and turned back by RoPE, and the norm before the projections
        cast = tile * (2 * (shape.q_width + 2 * shape.kv_width) + 2 * shape.hidden)
        return [
            {"gradients": gradients, "attention": results + dout, "mlp": mlp, "other": own},
            {"gradients": gradients, "attention": flowing, "other": own},
            {"gradients": gradients, "attention": flowing, "mlp": cast, "other": own},
        ]

    def _inputs_of_group(self, index: int) -> int:
        """attn_out_every: the inputs of a group's layers, made again from the first one, until each is used."""
        policy = self._cost.layers[index].policy
        return policy.place * self._shape.hidden_bytes


def _made_again(kept: int, keeps_input: bool, shape: RankShape) -> int:
    """The part of out and lse that was not kept."""
    results_kept = max(0, kept - shape.hidden_bytes * keeps_input)
    return max(0, shape.result_bytes - results_kept)
