"""Seconds of a whole training step, by part, on a machine that need not be here: the one reckoning of time. No torch.

`burst plan` shows it, memory=auto compares policies by it, attention=auto methods by its first part, and what
`burst plan` recommends is what it finds to be faster. Every part is a formula of the field; their sum is compared with
published steps by `benchmarks.bench_published`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from engine.config.settings import MemoryConfig, RunConfig
from engine.planning.methods.presets import BYTES_OF, AttentionMethod, tile_tokens_of
from engine.planning.topology import Topology, sequence_group
from engine.predict.attention import MOST_RANKS_PLANNED, AttentionPreview, preview_attention
from engine.predict.flops import StepParts, StepTime, count_parameters
from engine.predict.machine import Machine
from engine.predict.plan_costs import LOSS_PASSES, layer_numbers
from engine.predict.policy_cost import PolicyCost, policy_cost

GRADIENT_BYTES = 4  # gradients are reduced in fp32
UPDATE_BYTES = 28  # that AdamW reads and writes per number
HOST_BYTES_PER_S = 200e9  # memory bandwidth of a server, which its ranks share


def predict_step(config: RunConfig, method: AttentionMethod, world: Topology, machine: Machine) -> StepTime:
    """A step of `config`, whose memory policy is named, with the attention of `method` on the ranks of `world`."""
    return _Step(config, method, world, machine).predict()


def replayed_attention(
    config: RunConfig, method: AttentionMethod, group: Topology, machine: Machine
) -> AttentionPreview:
    """The preview that the time of attention is read from: plans of `timed_ranks`, made once."""
    kept, plain = config.memory, MemoryConfig()
    kind = "attn_out" if kept.activation_checkpoint == "attn_out_every" else kept.activation_checkpoint
    fraction = kept.saved_fraction if kind == "seq_fraction" or kept.checkpoint_layers else plain.saved_fraction
    # Of a policy only what is attended again matters here.
    alike = replace(
        plain, activation_checkpoint=kind, checkpoint_layers=kept.checkpoint_layers, saved_fraction=fraction
    )
    return _replayed(replace(config, memory=alike), method, group, machine)


@lru_cache(maxsize=16)
def _replayed(config: RunConfig, method: AttentionMethod, group: Topology, machine: Machine) -> AttentionPreview:
    return preview_attention(config, method, group, machine, timed_ranks(config, group))


def timed_ranks(config: RunConfig, group: Topology) -> tuple[int, ...] | None:
    """Of a large group the ranks that end last: those at an edge between nodes, and the last one. None: as previews do.

    Under other masks than causal and full they need not be the last; plans are short there.
    """
    kinds = config.attention.mask_layers or (config.attention.mask,)
    if group.size <= MOST_RANKS_PLANNED or not {"causal", "full"}.issuperset(kinds):
        return None
    edge = group.local_ranks if group.nodes > 1 else 1
    return tuple(sorted({edge - 1, edge, group.size - 1}))


class _Step:
    """What one rank does in a step; `micro_steps` forward and backward passes, and an update."""

    def __init__(self, config: RunConfig, method: AttentionMethod, world: Topology, machine: Machine) -> None:
        self.config, self.method, self.world, self.machine = config, method, world, machine
        self.group = sequence_group(world, method.cp_size, config.parallel.tp_size)
        self.cost: PolicyCost = policy_cost(config, method)
        self.micro_steps = config.train.grad_accum_steps
        self.element = BYTES_OF[config.train.compute_dtype]
        self.tp_size = config.parallel.tp_size
        self.tile_tokens = tile_tokens_of(config, self.method)
        # Tokens of the step that a rank's share of the work is: under tensor parallelism a share of every token's.
        self.rows = config.train.micro_batch_size * self.micro_steps * config.train.seq_len / self.group.size
        self.parameters = count_parameters(config.model)

    def predict(self) -> StepTime:
        """Its time."""
        config, world, machine = self.config, self.world, self.machine
        attention = replayed_attention(config, self.method, self.group, machine).time
        times = self.micro_steps
        matrices_s, again_s = self._matrices()
        elementwise_s, loss_s = self._elementwise_s(), self._loss_s()
        # What copies and FSDP's messages hide behind: computing, of which outside attention a third is forward. Where
        # attention waits for messages, the links are busy.
        forward_s = times * attention.forward_s + (matrices_s + elementwise_s + loss_s) / 3
        attention_s = times * (attention.seconds - attention.exposed_s)
        backward_s = attention_s + matrices_s + again_s + elementwise_s + loss_s - forward_s
        weights_s, gradients_s = self._fsdp(forward_s, backward_s)
        parts = StepParts(
            attention_forward=times * attention.forward_s,
            attention_again=times * attention.again_s,
            attention_backward=times * attention.backward_s,
            attention_exposed=times * attention.exposed_s,
            matrices=matrices_s + again_s,
            elementwise=elementwise_s,
            loss=loss_s,
            weights=weights_s,
            gradients=gradients_s,
            tensor_parallel=self._tensor_parallel_s(),
            offload=self._exposed_copies(forward_s, backward_s),
            optimizer=self._update_s(forward_s, backward_s),
            overhead=self._overhead_s(forward_s + backward_s),
        )
        groups = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
        tokens = groups * config.train.micro_batch_size * times * config.train.seq_len
        peak = config.train.peak_flops_per_device or machine.peak(config.train.compute_dtype).flops_per_s
        return StepTime(machine.name, parts, tokens, world.size, self.cost.flops, peak)

    def _matrices(self) -> tuple[float, float]:
        """(forward and backward, what is computed again) of the layers' products, each at the rate of its shape."""
        model, tp_size = self.config.model, self.tp_size
        query, kv = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        shapes = ((hidden, query), (hidden, kv), (query, hidden), (hidden, 2 * ffn), (ffn, hidden))
        once = model.num_layers * sum(self._trained_s(*shape) for shape in shapes)
        trained = 6 * self.parameters.layer_matmuls * self.rows / tp_size
        return once, once * self.cost.linear_flops / self.world.size / trained

    def _trained_s(self, inputs: int, outputs: int) -> float:
        """Three products with a matrix: forward, and the gradients of both its operands."""
        tokens = self.tile_tokens or self.rows / self.micro_steps
        side = min(tokens, inputs, outputs / self.tp_size)
        return 6 * inputs * outputs * self.rows / self.tp_size / self.machine.product_flops_per_s(side)

    def _elementwise_s(self) -> float:
        """Forward, backward with twice the numbers, and once more where a policy computes the layer again."""
        model = self.config.model
        again = sum(again > 0 for again in self.cost.layer_matrices)
        rows_s = self._moved_s((3 * model.num_layers + again) * layer_numbers(model), model.hidden_size)
        return rows_s + self._weight_sums_s()

    def _weight_sums_s(self) -> float:
        """Gradients of the layers' weights, added in fp32 to those of the tiles before."""
        if self.tile_tokens is None:
            return 0.0
        tiles = math.ceil(self.rows / self.micro_steps / self.tile_tokens)
        numbers = self.micro_steps * (tiles - 1) * self.parameters.layer_matmuls
        return numbers * (self.element + 2 * GRADIENT_BYTES) / self.machine.elementwise_bytes_per_s

    def _loss_s(self) -> float:
        model = self.config.model
        logits = LOSS_PASSES * model.vocab_size
        return self._trained_s(model.hidden_size, model.vocab_size) + self._moved_s(logits, model.vocab_size)

    def _moved_s(self, numbers: int, width: int) -> float:
        """So many numbers of every row, in operands of `width` numbers a row."""
        rows = self.rows / self.tp_size
        operand_bytes = self.element * width * (self.tile_tokens or rows / self.micro_steps)
        return self.element * numbers * rows / self.machine.moved_bytes_per_s(operand_bytes)

    def _fsdp(self, forward_s: float, backward_s: float) -> tuple[float, float]:
        """(gathers, reductions) that compute does not hide.

        A layer's weights are gathered while the layer before it works, and its gradients reduced while the next one
        does: nothing hides the first gather and the last reduction, which are the embedding's. Between copies of the
        model gradients are summed once more, behind backward too.
        """
        config, times = self.config, self.micro_steps
        shards = config.parallel.dp_shard_size * self.group.size
        gather_s = self.element * self._ring_s(shards)
        reduce_s = GRADIENT_BYTES * self._ring_s(shards)
        reduce_s += 2 * GRADIENT_BYTES / shards * self._ring_s(config.parallel.dp_replicate_size, apart=shards)
        embedding = self.config.model.vocab_size * self.config.model.hidden_size / self.parameters.total
        # Reductions come first in backward's queue, for the optimizer waits for them.
        hidden = max(0.0, backward_s - times * reduce_s)
        weights_s = max(embedding * gather_s, times * gather_s - forward_s) + max(0.0, times * gather_s - hidden)
        gradients_s = max(embedding * reduce_s, times * reduce_s - backward_s)
        if self.machine.is_cpu:
            # Of gloo FSDP2 waits for every collective, and its reduction moves as much as an all-reduce.
            weights_s, gradients_s = 2 * times * gather_s, 2 * times * reduce_s
        # What a message carries is packed before or unpacked after it: read and written once.
        packed_s = times * self.parameters.total / self.tp_size / self.machine.elementwise_bytes_per_s
        weights_s += 2 * 2 * self.element * packed_s
        return weights_s, gradients_s + (self.element + GRADIENT_BYTES) * packed_s

    def _ring_s(self, ranks: int, apart: int = 1) -> float:
        """Seconds per byte of a number when all parameters go around once among `ranks` ranks that lie `apart`.

        RingGrid that leave a node share its links to others; all links of a node carry one that all its ranks are in.
        """
        world, machine = self.world, self.machine
        if ranks == 1:
            return 0.0
        rate = machine.intra_bytes_per_s
        if ranks * apart * self.tp_size > world.local_ranks:
            of_node = machine.inter_bytes_per_s * (1 if machine.shared_nic else world.local_ranks)
            rings = min(world.local_ranks, apart * self.tp_size)
            rate = min(rate, of_node / rings)
        return self.parameters.total / self.tp_size * (ranks - 1) / ranks / rate

    def _tensor_parallel_s(self) -> float:
        """Two gathers and two scatters of a layer's rows in every pass, which nothing hides."""
        model, again = self.config.model, sum(again > 0 for again in self.cost.layer_matrices)
        row = self.element * model.hidden_size * (self.tp_size - 1) / self.tp_size
        return 4 * (2 * model.num_layers + again) * row * self.rows / self.machine.intra_bytes_per_s

    def _exposed_copies(self, forward_s: float, backward_s: float) -> float:
        """Of the copies to the host during forward, and back during backward, what these do not hide."""
        one_way_s = self.cost.moved_bytes / 2 / self.machine.host_bytes_per_s
        return max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - backward_s)

    def _update_s(self, forward_s: float, backward_s: float) -> float:
        """AdamW over the shards of one rank. On the host a GPU hides it inside backward, else behind the next forward
        pass, but for that of the embedding: its gradient is the last to come, and forward begins with it.
        """
        config, memory = self.config, self.config.memory
        numbers = self.parameters.total / (self.world.size // config.parallel.dp_replicate_size)
        if memory.optimizer_store != "host":
            return numbers * UPDATE_BYTES / self.machine.update_bytes_per_s
        update_s = numbers * UPDATE_BYTES / (HOST_BYTES_PER_S / self.world.local_ranks)
        if self.machine.is_cpu:
            return update_s
        embedding = config.model.vocab_size * config.model.hidden_size / self.parameters.total
        return max(embedding * update_s, update_s - (backward_s if memory.optimizer_in_backward else forward_s))

    def _overhead_s(self, compute_s: float) -> float:
        machine, layers = self.machine, self.config.model.num_layers * self.micro_steps
        overhead_s = machine.step_overhead_s + layers * machine.layer_overhead_s
        return overhead_s if machine.is_cpu else max(0.0, overhead_s - compute_s)
