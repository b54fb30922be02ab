"""Fewer steps than a file expects: what the file says of warm-up and decay is shortened, not refused."""

from __future__ import annotations

from dataclasses import replace

from engine.config import RunConfig


def fit_to_steps(config: RunConfig, sources: dict[str, str]) -> tuple[RunConfig, tuple[str, ...]]:
    """(the configuration with counts of steps that fit a typed train.steps, a note on each that was shortened).

    Only where train.steps was typed, as a first try is, and the other count was not: what both were typed, or both
    stand in files, is a contradiction that only its author can resolve.
    """
    typed = sources.get("train.steps", "default")
    if not _is_typed(typed) or config.train.steps < 1:
        return config, ()
    steps, optimizer, train = config.train.steps, config.optimizer, config.train
    warmup = min(optimizer.warmup_steps, steps)
    limits = {"optimizer.warmup_steps": (optimizer.warmup_steps, steps)}
    if optimizer.schedule == "wsd" and optimizer.decay_steps is not None:
        limits["optimizer.decay_steps"] = (optimizer.decay_steps, steps - warmup)
    limits["train.warmup_metric_steps"] = (train.warmup_metric_steps, steps - 1)
    fitted = {
        key: most
        for key, (wanted, most) in limits.items()
        if wanted > most and not _is_typed(sources.get(key, "default"))
    }
    sources.update(dict.fromkeys(fitted, typed))
    notes = tuple(f"{key} is {most}, not {limits[key][0]}: the run has {steps} steps" for key, most in fitted.items())
    changes = {key.rpartition(".")[2]: most for key, most in fitted.items() if key.startswith("optimizer.")}
    metric = fitted.get("train.warmup_metric_steps", train.warmup_metric_steps)
    train = replace(train, warmup_metric_steps=metric)
    return replace(config, optimizer=replace(optimizer, **changes), train=train), notes


def _is_typed(source: str) -> bool:
    return source != "default" and not source.endswith(".yaml")
