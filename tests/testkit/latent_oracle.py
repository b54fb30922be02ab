"""Attention on latents in one process: dense float64 attention of what they expand to, and a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.executor import Fields
from engine.attention.latent import LatentExpansion, LatentHeads
from engine.attention.latent_attention import LatentBackward
from engine.attention.runtime import AttentionRuntime, KvOperand, SavedAttention
from engine.kernels.attention.base import TileKernel
from engine.kernels.attention.reference import ReferenceKernel
from engine.planning.methods.blocks import Blocks
from engine.planning.program.ops import LatentShape, LinkBytes
from engine.planning.schedules.plan import PlanPair
from engine.planning.topology import Topology
from testkit.attention_oracle import PoisonedRuntime, gather
from testkit.hub import Hub, lockstep, poison

NAMES = ("dq", "dlatent", "dweight", "dbias")


@dataclass(frozen=True)
class LatentInputs:
    """Random q [N, H, qk_dim], latents [N, 1, rank + rope_dim], weight, bias and dout [N, H, v_dim], float64."""

    q: Tensor
    latents: Tensor
    weight: Tensor
    bias: Tensor
    dout: Tensor
    heads: LatentHeads

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What has gradients, in the order of NAMES."""
        return self.q, self.latents, self.weight, self.bias


def random_latents(rows: int, num_heads: int, num_kv_heads: int) -> LatentInputs:
    """Heads of 7 channels, 3 of them with the position, and of 5 for v; latents of 6 numbers."""
    heads = LatentHeads(LatentShape(rank=6, rope_dim=3), num_kv_heads, qk_dim=7, v_dim=5)
    generator = torch.Generator().manual_seed(3)
    shapes = [(rows, num_heads, 7), (rows, 1, 9), heads.weight_shape, heads.weight_shape[:1], (rows, num_heads, 5)]
    return LatentInputs(*(torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes), heads)


def latent_oracle(inputs: LatentInputs, visible: Tensor) -> dict[str, Tensor]:
    """out and all gradients by dense attention and autograd; rows that see nothing give 0."""
    q, latents, weight, bias = leaves = [x.clone().requires_grad_() for x in inputs.leaves]
    rank, nope = inputs.heads.latent.rank, inputs.heads.nope_dim
    expanded = (latents[:, 0, :rank] @ weight.T + bias).unflatten(1, (inputs.heads.num_kv_heads, -1))
    rope = latents[:, :, rank:].expand(-1, inputs.heads.num_kv_heads, -1)
    k, v = torch.cat([expanded[..., :nope], rope], -1), expanded[..., nope:]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    weights = weights.masked_fill(~visible.any(1)[None, :, None], 0.0)
    out = torch.einsum("hij,jhd->ihd", weights, v)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    return {"out": out.detach(), **dict(zip(NAMES, gradients, strict=True))}


@dataclass(frozen=True)
class LatentResult:
    """Gathered results in global order and the bytes that every rank sent."""

    values: dict[str, Tensor]
    forward_bytes: dict[int, LinkBytes]
    backward_bytes: dict[int, LinkBytes]


@dataclass(frozen=True)
class LatentGroup:
    """All ranks of a group in this process, whose keys and values travel as latents."""

    plans: PlanPair
    blocks: Blocks
    kernel: TileKernel
    topology: Topology
    before: int | None = None  # where the queries end that the recompute pass attends again
    late: bool = True

    def run(self, inputs: LatentInputs) -> LatentResult:
        index = [
            torch.from_numpy(self.blocks.rank_layout.positions(rank)) for rank in range(self.blocks.rank_layout.size)
        ]
        forward_hub, backward_hub = (Hub(len(index), self.topology, late=self.late) for _ in range(2))
        saved = self._forward(inputs, index, forward_hub)
        outs = [each.out for each in saved]
        if self.plans.recompute is not None:
            saved = self._again(inputs, index, saved)
        expansions = [self._expansion(inputs, trains=True) for _ in index]
        backwards = [
            LatentBackward(self._runtime(rank, backward_hub), each, inputs.dout[index[rank]], expansions[rank])
            for rank, each in enumerate(saved)
        ]
        lockstep([each.execution for each in backwards], backward_hub)
        dq, dlatent = zip(*(each.gradients() for each in backwards), strict=True)
        values = {name: gather(index, list(parts)) for name, parts in (("out", outs), ("dq", dq), ("dlatent", dlatent))}
        values["dweight"] = torch.stack([each.weight_gradient for each in expansions]).sum(0)
        values["dbias"] = torch.stack([each.bias_gradient for each in expansions]).sum(0)
        return LatentResult(values, forward_hub.sent, backward_hub.sent)

    def _forward(self, inputs: LatentInputs, index: list[Tensor], hub: Hub) -> list[SavedAttention]:
        runtimes = [self._runtime(rank, hub) for rank in range(len(index))]
        operands = [self._operands(inputs, rows) for rows in index]
        executions = [r.execution(r.forward, q, kv) for r, (q, kv) in zip(runtimes, operands, strict=True)]
        lockstep(executions, hub)
        collected = zip(runtimes, executions, operands, strict=True)
        return [r.collect_of(execution, q, kv.fields)[1] for r, execution, (q, kv) in collected]

    def _again(self, inputs: LatentInputs, index: list[Tensor], saved: list[SavedAttention]) -> list[SavedAttention]:
        """What was saved, of which a recompute pass makes the first rows and a reversed ring's last block again."""
        assert self.plans.recompute is not None
        hub = Hub(len(index), late=self.late)
        rows = [self.blocks.recomputed_rows(self.before or 0, rank) for rank in range(len(index))]
        operands = [self._operands(inputs, positions) for positions in index]
        executions = [
            self._runtime(rank, hub).execution(self.plans.recompute.ranks[rank], q, kv)
            for rank, (q, kv) in enumerate(operands)
        ]
        lockstep(executions, hub)
        again = []
        for rank, execution in enumerate(executions):
            results: Fields = {name: getattr(saved[rank], name).clone() for name in ("out", "lse")}
            for name, tensor in results.items():
                poison(tensor[: rows[rank]])
                tensor[: rows[rank]] = execution.argument("out_lse")[name]
            final = "final_kv" in self.plans.recompute.ranks[rank].arguments
            kv = execution.argument("final_kv") if final else operands[rank][1].fields
            again.append(replace(saved[rank], kv=kv, **results))
        return again

    def _operands(self, inputs: LatentInputs, rows: Tensor) -> tuple[Tensor, KvOperand]:
        return inputs.q[rows], KvOperand.compressed(inputs.latents[rows], self._expansion(inputs))

    def _expansion(self, inputs: LatentInputs, *, trains: bool = False) -> LatentExpansion:
        return LatentExpansion(inputs.heads, inputs.weight, inputs.bias, torch.float64, trains=trains)

    def _runtime(self, rank: int, hub: Hub) -> AttentionRuntime:
        forward, backward = self.plans.forward.ranks[rank], self.plans.backward.ranks[rank]
        return PoisonedRuntime(forward, backward, self.kernel, hub.transport(rank), torch.float64)


def build_latent_group(plans: PlanPair, blocks: Blocks, topology: Topology, before: int | None) -> LatentGroup:
    """With the reference kernel."""
    return LatentGroup(plans, blocks, ReferenceKernel(), topology, before)
