"""The head as an FSDP2 unit of its own: gradients of the whole, in the parameters' dtype, never from stale weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from engine.config import LossConfig
from engine.loss.head import LMHead

ROWS, VOCAB, SIZE, STEPS = 36, 23, 12, 3


def make_head() -> LMHead:
    """An fp32 head with fixed weights."""
    head = LMHead(SIZE, VOCAB, LossConfig(chunk_tokens=5, z_loss=0.01))
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(0)))
    return head


def make_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """hidden [ROWS, SIZE] and labels [ROWS] of all ranks."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, SIZE, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[::5] = -100
    return hidden, labels


def train(head: LMHead, hidden: Tensor, labels: Tensor) -> list[tuple[float, Tensor]]:
    """(loss sum, gradient of hidden) of every step of plain gradient descent; the head is changed."""
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    steps = []
    for _ in range(STEPS):
        rows = hidden.clone().requires_grad_()
        loss = head(rows, labels)
        (loss / ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert rows.grad is not None
        steps.append((loss.item(), rows.grad))
    return steps


def train_sharded(param_dtype: torch.dtype) -> tuple[list[tuple[float, Tensor]], Tensor]:
    """This rank's rows through the sharded head; (its steps, the whole weight afterwards)."""
    head = make_head()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    unit: Any = fully_shard(head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    hidden, labels = make_rows(param_dtype)
    steps = train(head, hidden[mine], labels[mine])
    weight: Any = head.weight
    assert weight.dtype == torch.float32
    return steps, weight.full_tensor().detach()


# bf16: gradients and gathered weights are rounded to 8 bits, per rank before the sum.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_sharded_head_trains_as_the_whole_one(ranks, dtype, tolerance) -> None:  # type: ignore[no-untyped-def]
    head = make_head()
    hidden, labels = make_rows(dtype)
    whole = train(head, hidden, labels)
    assert whole[-1][0] < whole[0][0] - 1.0  # steps matter: a stale weight would be seen
    results = ranks(2).run(train_sharded, dtype)
    for step, (loss, gradient) in enumerate(whole):
        parts = [steps[step] for steps, _ in results]
        assert sum(part for part, _ in parts) == pytest.approx(loss, rel=tolerance)
        for rank, (_, part) in enumerate(parts):
            assert part.dtype == dtype
            torch.testing.assert_close(part, gradient[rank::2], rtol=tolerance, atol=tolerance)
    for _, weight in results:
        torch.testing.assert_close(weight, head.weight.detach(), rtol=tolerance, atol=tolerance)
