"""Seconds of a whole training step, by part, on a machine that need not be here; what a policy adds. No torch.

    attention    its plans replayed (`engine.planning.methods.preview`): busiest rank, exposed messages, recomputation
    matrices     FLOPs of projections, MLP and LM head, what a policy computes again too, over the matrix rate
    elementwise  bytes that norms, RoPE, SwiGLU, residuals and the loss read and write, over the memory's bandwidth
    weights      FSDP: two gathers in the compute dtype and a reduction in fp32 per micro-step, unless compute hides it
    offload      copies of activations to the host and back that compute cannot hide
    optimizer    AdamW over this rank's shards, on the device or on the host; inside backward the host's is hidden
                 but for the gradient that comes last

Each is a formula of the field (Rajbhandari et al. 2020 for weights); their sum was compared with published steps in
docs/attention.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.config.settings import RunConfig
from engine.planning.memory.cost import LayerCost, PolicyCost
from engine.planning.methods.preview import AttentionPreview
from engine.planning.methods.topology import Topology
from engine.planning.time.flops import Flops, count_parameters, mfu, step_flops
from engine.planning.time.machine import Machine

UPDATE_BYTES = 28  # that AdamW reads and writes per number
HOST_BYTES_PER_S = 200e9  # memory bandwidth of a server, which its ranks share


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step; `exposed_s` is the part of attention in which it waits for messages.

    tokens   of the step, over all ranks
    mfu      model FLOPs, pairs counted by the mask, over the configured or published peak; None: nobody knows it
    """

    machine: str
    attention_s: float
    exposed_s: float
    matrices_s: float
    elementwise_s: float
    weights_s: float
    offload_s: float
    optimizer_s: float
    tokens: int
    world_size: int
    mfu: float | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, which add up to `seconds`."""
        names = ("attention", "matrices", "elementwise", "weights", "offload", "optimizer")
        return {name: getattr(self, f"{name}_s") for name in names}

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput as publications give it."""
        return self.tokens / self.seconds / self.world_size

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **asdict(self),
            "seconds": self.seconds,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
        }


def predict_step(
    config: RunConfig, world: Topology, preview: AttentionPreview, cost: PolicyCost, flops: Flops
) -> StepTime:
    """The step of settled `config` on `world`; `preview` with a machine, `flops` of a step over all ranks."""
    machine, attention = preview.machine, preview.time_to_dict()
    assert machine is not None
    assert attention is not None
    micro_steps = config.train.grad_accum_steps
    attention_s = micro_steps * attention["seconds"]
    forward_s, backward_s = _matrix_seconds(config, world, cost, machine)
    elementwise_s = _elementwise_bytes(config, world, cost) / machine.elementwise_bytes_per_s
    compute_s = attention_s + forward_s + backward_s + elementwise_s
    tokens = _sequences(config) * config.train.seq_len
    time = StepTime(
        machine=machine.name,
        attention_s=attention_s,
        exposed_s=micro_steps * attention["exposed_s"],
        matrices_s=forward_s + backward_s,
        elementwise_s=elementwise_s,
        weights_s=max(0.0, _weight_seconds(config, world, machine) - compute_s),
        offload_s=_exposed_copies(cost, machine, forward_s + attention_s / 4, compute_s * 3 / 4),
        optimizer_s=_exposed_update(config, world, machine, compute_s * 3 / 4),
        tokens=tokens,
        world_size=world.size,
    )
    peak = config.train.peak_flops_per_device or machine.peak(config.train.compute_dtype).flops_per_s
    if peak is None:
        return time
    return replace(time, mfu=mfu(flops.model, step_time_s=time.seconds, devices=world.size, peak_flops_per_s=peak))


def plain_step_seconds(config: RunConfig, world: Topology, machine: Machine) -> float:
    """A step in which nothing is computed again or waited for."""
    return 3 * _forward_seconds(config, world, machine)


def extra_seconds(config: RunConfig, world: Topology, cost: PolicyCost, machine: Machine) -> float:
    """What a policy adds, without plans: recomputation, copies that compute does not hide, updates on the host."""
    again_s = cost.linear_flops / world.size / machine.matmul_flops_per_s
    sequences = config.train.micro_batch_size * config.train.grad_accum_steps
    busiest = sum(map(_busiest_flops, cost.layers)) * sequences / config.parallel.tp_size
    again_s += busiest / machine.forward_flops_per_s
    forward_s = _forward_seconds(config, world, machine)
    backward_s = 2 * forward_s + again_s
    on_host = config.memory.optimizer_store == "host"
    update_s = _exposed_update(config, world, machine, backward_s) if on_host else 0.0
    return again_s + _exposed_copies(cost, machine, forward_s, backward_s) + update_s


def _busiest_flops(layer: LayerCost) -> float:
    return layer.attention_flops * layer.busiest_share


def _sequences(config: RunConfig) -> int:
    """Sequences of a step, over all ranks."""
    parallel, train = config.parallel, config.train
    groups = parallel.dp_replicate_size * parallel.dp_shard_size
    return groups * train.micro_batch_size * train.grad_accum_steps


def _forward_seconds(config: RunConfig, world: Topology, machine: Machine) -> float:
    """Matrices, and attention with half of all pairs visible: what there is to hide copies behind."""
    model, seq_len, sequences = config.model, config.train.seq_len, _sequences(config)
    pairs = model.num_layers * sequences * (seq_len**2 // 2)
    whole = step_flops(model, seq_len=seq_len, visible_pairs=pairs, sequences=sequences).model / 3
    matrices = 2 * count_parameters(model).matmul * seq_len * sequences
    attention = whole - matrices
    return (matrices / machine.matmul_flops_per_s + attention / machine.forward_flops_per_s) / world.size


def _matrix_seconds(config: RunConfig, world: Topology, cost: PolicyCost, machine: Machine) -> tuple[float, float]:
    """(forward, backward with what is computed again) of one rank."""
    forward = 2 * count_parameters(config.model).matmul * _sequences(config) * config.train.seq_len
    rate = machine.matmul_flops_per_s * world.size
    return forward / rate, (2 * forward + cost.linear_flops) / rate


def _elementwise_bytes(config: RunConfig, world: Topology, cost: PolicyCost) -> float:
    """Read and written by one rank in a step, kernels fused as the engine has them.

    Per layer and token, forward: two norms (4 d numbers), two residual sums (6 d), RoPE (2 of q and k), SwiGLU (3 f).
    Backward moves twice that, and a policy that computes the layer again once more. Logits: four passes over V.
    """
    model, element = config.model, 2 if config.train.compute_dtype == "bfloat16" else 4
    rotated = (model.num_heads + model.num_kv_heads) * model.head_dim
    layer = 10 * model.hidden_size + 2 * rotated + 3 * model.ffn_hidden_size
    again = sum(one.linear_flops > 0 for one in cost.layers)
    numbers = (3 * model.num_layers + again) * layer + 4 * model.vocab_size
    return element * numbers * _sequences(config) * config.train.seq_len / world.size


def _weight_seconds(config: RunConfig, world: Topology, machine: Machine) -> float:
    """FSDP's messages of one rank in a step: all links of a node carry its ranks' rings together."""
    parallel, train = config.parallel, config.train
    shards = world.size // parallel.dp_replicate_size // parallel.tp_size
    if shards == 1:
        return 0.0
    element = 2 if train.compute_dtype == "bfloat16" else 4
    numbers = count_parameters(config.model).total / parallel.tp_size * (shards - 1) / shards
    rate = machine.intra_bytes_per_s
    if shards > world.local_ranks // parallel.tp_size:
        rate = min(rate, machine.inter_bytes_per_s * (1 if machine.shared_nic else world.local_ranks))
    return numbers * (2 * element + 4) * train.grad_accum_steps / rate


def _exposed_copies(cost: PolicyCost, machine: Machine, forward_s: float, backward_s: float) -> float:
    """Of the copies to the host during forward, and back during backward, what these do not hide."""
    one_way_s = cost.moved_bytes / 2 / machine.host_bytes_per_s
    return max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - backward_s)


def _exposed_update(config: RunConfig, world: Topology, machine: Machine, backward_s: float) -> float:
    """Of the update, what a backward pass of `backward_s` does not hide: inside it the host's is hidden, but for that
    of the embedding, whose gradient is complete at its end.
    """
    update_s, memory = _update_seconds(config, world, machine), config.memory
    if memory.optimizer_store != "host" or not memory.optimizer_in_backward:
        return update_s
    last = config.model.vocab_size * config.model.hidden_size / count_parameters(config.model).total
    return max(last * update_s, update_s - backward_s)


def _update_seconds(config: RunConfig, world: Topology, machine: Machine) -> float:
    """AdamW over the shards of one rank."""
    numbers = count_parameters(config.model).total / (world.size // config.parallel.dp_replicate_size)
    on_host = config.memory.optimizer_store == "host"
    return (
        numbers * UPDATE_BYTES / (HOST_BYTES_PER_S / world.local_ranks if on_host else machine.elementwise_bytes_per_s)
    )
