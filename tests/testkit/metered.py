"""Steps of tiny runs under a StepMeter: what a row of metrics.jsonl says of them."""

from __future__ import annotations

from typing import Any

from engine.config.settings import RunConfig
from engine.data.sampler import Batch
from engine.predict.machine import Peak
from engine.training.metrics import StepMeter
from engine.training.trainer import step_cost
from testkit.tiny_training import TinyRun, own_part, start_run


def meter_of(run: TinyRun, **how: Any) -> StepMeter:
    """The meter of a run on devices of 10^9 FLOP/s, its activations included."""
    method = run.attention.method
    cost = step_cost(run.train_step.config, run.mesh.dp_size, Peak(1e9, "test"), method)
    return StepMeter(run.mesh, run.attention, cost, store=run.model.activation_store, **how)


def metered_rows(config: RunConfig, batch: Batch, steps: int = 1, **how: Any) -> list[dict[str, Any]]:
    """Rows of steps that each train on the same global batch."""
    run = start_run(config)
    meter, rows = meter_of(run, **how), []
    for step in range(steps):
        meter.start()
        with meter.count_tensors():
            result = run.train_step(step, own_part(batch, run.mesh, micro_steps=config.train.grad_accum_steps))
        row, stop = meter.finish(step + 1, result)
        assert not stop
        rows.append(row)
    return rows
