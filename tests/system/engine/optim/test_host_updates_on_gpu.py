"""Updates on the host from gradients that a GPU copies: the weights are those of updates on the device."""

from __future__ import annotations

import pytest
import torch
from testkit.tiny_training import full_weights, own_part, random_batches, start_run, tiny_config
from torch import Tensor

STEPS, MICRO_STEPS = 3, 2
TOLERANCE = 1e-4  # AdamW's kernels of a GPU and a CPU round otherwise, and moments near zero keep it; CPU alone: 0
RULES = {
    "device": {},
    "host": {"optimizer_store": "host"},
    "host, in backward": {"optimizer_store": "host", "optimizer_in_backward": True},
}


def weights_after(place: str, micro_steps: int) -> dict[str, Tensor]:
    config = tiny_config(
        memory=RULES[place],
        optimizer={"learning_rate": 3e-3, "schedule": "constant", "max_grad_norm": None},
        attention={"preset": "single"},
        train={"grad_accum_steps": micro_steps},
        cluster={"ranks_share_device": True},
    )
    run = start_run(config)
    assert run.mesh.device.type == "cuda"
    for step in range(STEPS):
        batch = random_batches(step, sequences=4)
        run.train_step(step, own_part(batch, run.mesh, micro_steps=micro_steps))
    return {name: weight.cpu() for name, weight in full_weights(run.model).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["host", "host, in backward"])
def test_updates_on_the_host_leave_the_weights_of_updates_on_the_device(ranks, place: str) -> None:
    micro_steps = 1 if "backward" in place else MICRO_STEPS
    (expected,) = ranks(1).run(weights_after, "device", micro_steps)
    (found,) = ranks(1).run(weights_after, place, micro_steps)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=TOLERANCE, atol=TOLERANCE)
