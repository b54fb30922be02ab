"""Check from the configuration alone whether the checkpoints of a run fit on their disk."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.settings import RunConfig
from engine.runs.figures import binary_bytes

_BYTES_PER_PARAMETER = 3 * 4  # master weight and two moments; 8-bit moments are saved as fp32, too


@dataclass(frozen=True)
class Shortage:
    """Too little disk space for checkpoints. is_total: not even one fits. remedy: what to do, as part of a sentence."""

    text: str
    remedy: str
    is_total: bool


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of one checkpoint over all ranks: fp32 weights and both moments of what is trained."""
    from engine.predict.trained import trained_parameters  # only launches that save look

    return _BYTES_PER_PARAMETER * trained_parameters(config.model)


def saves_checkpoints(config: RunConfig) -> bool:
    """Return whether this run writes checkpoints."""
    return config.train.checkpoint.is_on and not config.train.evaluate_only


def find_shortage(config: RunConfig, folder: str, free: int, share: float = 1.0) -> Shortage | None:
    """Return the shortage of disk space for checkpoints of this run; None: they fit, or none are written.

    Args:
        config: The configuration of the run.
        folder: Folder of the checkpoints, for the message.
        free: Free bytes of its disk.
        share: Part of each checkpoint that is written to this disk: the share of nodes that use it, since ranks have
            equal parts of the weights (up to rounding of a tensor's first dimension).
    """
    if not saves_checkpoints(config):
        return None
    settings = config.train.checkpoint
    size = round(share * checkpoint_bytes(config))
    # A new checkpoint is written before the oldest is deleted.
    number = settings.keep_last + 1 if settings.is_periodic else 1
    if free >= number * size:
        return None
    part = "a checkpoint" if share >= 1 else "its part of a checkpoint"
    together = f", up to {number} at a time {binary_bytes(number * size)}" if number > 1 else ""
    text = f"{part} takes {binary_bytes(size)}{together}, but {folder} has {binary_bytes(free)} free"
    if free >= size:
        remedy = "free space, name another folder with train.checkpoint.folder, or lower train.checkpoint.keep_last"
        return Shortage(text, remedy, is_total=False)
    again = "free space, then launch again (a run that has started: `burst resume`)"
    return Shortage(text, f"{again}, or name another folder with train.checkpoint.folder", is_total=True)
