"""Fewer steps than a file expects: what the file says of warm-up and decay is shortened, not refused."""

from __future__ import annotations

from dataclasses import replace

from engine.config.settings import RunConfig


def fit_to_steps(config: RunConfig, sources: dict[str, str]) -> tuple[RunConfig, tuple[str, ...]]:
    """(the configuration with counts of steps that fit a typed train.steps, a note on each that was shortened).

    Only where train.steps was typed, as a first try is, and the other count was not: what both were typed, or both
    stand in files, is a contradiction that only its author can resolve.
    """
    typed, steps = sources.get("train.steps", "default"), config.train.steps
    if not _is_typed(typed) or steps < 1:
        return config, ()
    notes: list[str] = []

    def at_most(key: str, wanted: int, most: int) -> int:
        if wanted <= most or _is_typed(sources.get(key, "default")):
            return wanted
        sources[key] = typed
        notes.append(f"{key} is {most}, not {wanted}: the run has {steps} steps")
        return most

    optimizer = config.optimizer
    warmup = at_most("optimizer.warmup_steps", optimizer.warmup_steps, steps)
    decay = optimizer.decay_steps
    if decay is not None and optimizer.schedule == "wsd":
        decay = at_most("optimizer.decay_steps", decay, max(0, steps - warmup))
    return replace(config, optimizer=replace(optimizer, warmup_steps=warmup, decay_steps=decay)), tuple(notes)


def _is_typed(source: str) -> bool:
    return source != "default" and not source.endswith(".yaml")
