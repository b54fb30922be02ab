"""Predicts the time of a training step, by part, on any machine. No torch.

The only model of time: `burst plan` shows it, memory=auto compares policies by it, attention=auto compares methods by
its attention part, and recommendations of `burst plan` are based on it. `benchmarks.bench_published` compares the sum
with published step times.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from engine.config.settings import MemoryConfig, RunConfig
from engine.planning.methods.presets import BYTES_OF, AttentionMethod, tile_tokens_of
from engine.planning.topology import Topology, sequence_group
from engine.predict.attention import MOST_RANKS_PLANNED, AttentionPreview, preview_attention
from engine.predict.flops import CHUNK_TOKENS, StepParts, StepTime, count_parameters, delta_rule_flops, layer_shapes
from engine.predict.machine import Machine
from engine.predict.plan_costs import LOSS_PASSES, layer_numbers
from engine.predict.policy_cost import PolicyCost, policy_cost
from engine.predict.trained import trained_parameters

GRADIENT_BYTES = 4  # gradients are reduced in fp32
UPDATE_BYTES = 28  # read and written by AdamW per parameter
HOST_BYTES_PER_S = 200e9  # memory bandwidth of a server, shared by its ranks


def predict_step(config: RunConfig, method: AttentionMethod, world: Topology, machine: Machine) -> StepTime:
    """Predict a step of `config`, whose memory policy is named, with `method` on the ranks of `world`."""
    return _Step(config, method, world, machine).predict()


def replayed_attention(
    config: RunConfig, method: AttentionMethod, group: Topology, machine: Machine
) -> AttentionPreview:
    """Return the replayed plans of `timed_ranks`, cached: the source of attention's time."""
    kept, plain = config.memory, MemoryConfig()
    kind = "attn_out" if kept.activation_checkpoint == "attn_out_every" else kept.activation_checkpoint
    fraction = kept.saved_fraction if kind == "seq_fraction" or kept.checkpoint_layers else plain.saved_fraction
    # Drop the parts of the policy that do not change recomputed attention, to share cache entries.
    alike = replace(
        plain, activation_checkpoint=kind, checkpoint_layers=kept.checkpoint_layers, saved_fraction=fraction
    )
    return _replayed(replace(config, memory=alike), method, group, machine)


@lru_cache(maxsize=16)
def _replayed(config: RunConfig, method: AttentionMethod, group: Topology, machine: Machine) -> AttentionPreview:
    return preview_attention(config, method, group, machine, timed_ranks(config, group))


def timed_ranks(config: RunConfig, group: Topology) -> tuple[int, ...] | None:
    """Return the ranks of a large group that finish last: those at a node boundary, and the last. None: all.

    With other masks than causal and full other ranks may finish last, but plans are short there, so all are replayed.
    """
    kinds = config.attention.mask_layers or (config.attention.mask,)
    if group.size <= MOST_RANKS_PLANNED or not {"causal", "full"}.issuperset(kinds):
        return None
    edge = group.local_ranks if group.nodes > 1 else 1
    return tuple(sorted({edge - 1, edge, group.size - 1}))


class _Step:
    """The work of one rank in a step: `micro_steps` forward and backward passes, and an update."""

    def __init__(self, config: RunConfig, method: AttentionMethod, world: Topology, machine: Machine) -> None:
        self.config, self.method, self.world, self.machine = config, method, world, machine
        self.group = sequence_group(world, method.cp_size, config.parallel.tp_size)
        self.cost: PolicyCost = policy_cost(config, method)
        self.micro_steps = config.train.grad_accum_steps
        self.element = BYTES_OF[config.train.compute_dtype]
        self.tp_size = config.parallel.tp_size
        self.tile_tokens = tile_tokens_of(config, self.method)
        # Tokens of the step per rank; with tensor parallelism a rank does 1 / tp_size of the work of each.
        self.rows = config.train.micro_batch_size * self.micro_steps * config.train.seq_len / self.group.size
        self.parameters = count_parameters(config.model)
        self.trained = trained_parameters(config.model)

    def predict(self) -> StepTime:
        """Predict its time."""
        config, world, machine = self.config, self.world, self.machine
        attention = replayed_attention(config, self.method, self.group, machine).time
        times = self.micro_steps
        matrices_s, again_s = self._matrices()
        elementwise_s, loss_s = self._elementwise_s(), self._loss_s()
        # Computation that can hide copies and FSDP's messages; outside attention a third of it is forward. Exposed
        # attention messages hide nothing, since the links are busy.
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
        """Return the seconds of the layers' matmuls and of their recomputation, each at the rate of its shape."""
        model, shapes = self.config.model, layer_shapes(self.config.model)
        dense_layers = model.num_layers - model.num_moe_layers
        linear_layers = model.linear_layers.num_layers
        once = (model.num_layers - linear_layers) * sum(self._trained_s(*shape) for shape in shapes.attention)
        once += linear_layers * (sum(self._trained_s(*shape) for shape in shapes.linear) + self._delta_rule_s())
        once += dense_layers * sum(self._trained_s(*shape) for shape in shapes.dense)
        once += model.num_moe_layers * sum(self._trained_s(*shape) for shape in shapes.shared)
        if model.num_moe_layers:  # products of an expert have its share of the tokens
            share = model.experts_per_token / model.num_experts
            expert_s = sum(self._trained_s(*shape, share=share) for shape in shapes.expert)
            once += model.num_moe_layers * model.num_experts * expert_s
        products = 3 if model.lora.rank is None else 2
        trained = 2 * products * self.parameters.active_layer_matmuls * self.rows / self.tp_size
        trained += 3 * linear_layers * delta_rule_flops(model) * self.rows
        return once, once * self.cost.linear_flops / self.world.size / trained

    def _delta_rule_s(self) -> float:
        """Return the seconds of one linear layer's products between rows and with states, forward and backward."""
        flops = 3 * delta_rule_flops(self.config.model) * self.rows
        return flops / self.machine.product_flops_per_s(CHUNK_TOKENS)

    def _trained_s(self, inputs: int, outputs: int, share: float = 1.0) -> float:
        """Return the seconds of the three matmuls with a weight: forward, and the gradients of both operands.

        Args:
            inputs: Of the weight.
            outputs: Of the weight.
            share: Of the tokens, that are multiplied with it.
        """
        tokens = share * (self.tile_tokens or self.rows / self.micro_steps)
        side = min(tokens, inputs, outputs / self.tp_size)
        products = 3 if self.config.model.lora.rank is None else 2  # frozen weights need no gradient
        flops = 2 * products * inputs * outputs * share * self.rows / self.tp_size
        return flops / self.machine.product_flops_per_s(side)

    def _elementwise_s(self) -> float:
        """Return the seconds of elementwise kernels: forward, backward (twice as much), and recomputation."""
        model = self.config.model
        again = sum(again > 0 for again in self.cost.layer_matrices)
        rows_s = self._moved_s((3 * model.num_layers + again) * layer_numbers(model), model.hidden_size)
        return rows_s + self._weight_sums_s()

    def _weight_sums_s(self) -> float:
        """Return the seconds of adding up weight gradients over tiles in fp32."""
        if self.tile_tokens is None:
            return 0.0
        tiles = math.ceil(self.rows / self.micro_steps / self.tile_tokens)
        numbers = self.micro_steps * (tiles - 1) * self.parameters.layer_matmuls
        return numbers * (self.element + 2 * GRADIENT_BYTES) / self.machine.elementwise_bytes_per_s

    def _loss_s(self) -> float:
        model = self.config.model
        logits = LOSS_PASSES * model.vocab_size
        return self._trained_s(model.hidden_size, model.vocab_size) + self._moved_s(logits, model.vocab_size)

    def _moved_s(self, numbers: float, width: int) -> float:
        """Return the seconds of moving `numbers` elements per row, in operands of `width` elements per row."""
        rows = self.rows / self.tp_size
        operand_bytes = self.element * width * (self.tile_tokens or rows / self.micro_steps)
        return self.element * numbers * rows / self.machine.moved_bytes_per_s(operand_bytes)

    def _fsdp(self, forward_s: float, backward_s: float) -> tuple[float, float]:
        """Return the exposed seconds of FSDP's all-gathers and of its reductions.

        A layer's weights are gathered while the layer before it computes, and its gradients are reduced while the next
        one does. The first gather and the last reduction, those of the embedding, are never hidden. With replicas
        (HSDP) an all-reduce follows each reduce-scatter, also hidden by backward.
        """
        config, times = self.config, self.micro_steps
        shards = config.parallel.dp_shard_size * self.group.size
        gather_s = self.element * self._ring_s(shards)
        reduce_s = GRADIENT_BYTES * self._ring_s(shards)
        reduce_s += 2 * GRADIENT_BYTES / shards * self._ring_s(config.parallel.dp_replicate_size, apart=shards)
        reduce_s *= self.trained / self.parameters.total
        embedding = self.config.model.vocab_size * self.config.model.hidden_size / self.parameters.total
        # In backward reductions are served first, since the optimizer waits for them.
        hidden = max(0.0, backward_s - times * reduce_s)
        weights_s = max(embedding * gather_s, times * gather_s - forward_s) + max(0.0, times * gather_s - hidden)
        gradients_s = max(embedding * reduce_s, times * reduce_s - backward_s)
        if self.machine.is_cpu:
            # With gloo FSDP2 waits for every collective, and its reduce-scatter moves as much as an all-reduce.
            weights_s, gradients_s = 2 * times * gather_s, 2 * times * reduce_s
        # Each message is packed before or unpacked after it: one read and one write.
        packed_s = times * self.parameters.total / self.tp_size / self.machine.elementwise_bytes_per_s
        weights_s += 2 * 2 * self.element * packed_s
        return weights_s, gradients_s + (self.element + GRADIENT_BYTES) * packed_s

    def _ring_s(self, ranks: int, apart: int = 1) -> float:
        """Return the seconds of a ring collective of all parameters among `ranks` ranks, per byte of an element.

        `apart` is the distance between neighbours in global ranks. Rings that leave a node share its links; a ring that
        contains all ranks of a node uses all of them.
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
        """Return the seconds of two all-gathers and two reduce-scatters of rows per layer and pass, never hidden."""
        model, again = self.config.model, sum(again > 0 for again in self.cost.layer_matrices)
        row = self.element * model.hidden_size * (self.tp_size - 1) / self.tp_size
        return 4 * (2 * model.num_layers + again) * row * self.rows / self.machine.intra_bytes_per_s

    def _exposed_copies(self, forward_s: float, backward_s: float) -> float:
        """Return the exposed seconds of copies to the host in forward and back in backward."""
        one_way_s = self.cost.moved_bytes / 2 / self.machine.host_bytes_per_s
        return max(0.0, one_way_s - forward_s) + max(0.0, one_way_s - backward_s)

    def _update_s(self, forward_s: float, backward_s: float) -> float:
        """Return the exposed seconds of AdamW over the shards of one rank.

        On the host of a GPU it overlaps with backward or with the next forward pass, except for the embedding, whose
        gradient arrives last and which forward needs first.
        """
        config, memory = self.config, self.config.memory
        numbers = self.trained / (self.world.size // config.parallel.dp_replicate_size)
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
