"""Whether the checkpoints of a run fit on the disk that they are written to, by the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.settings import RunConfig
from engine.predict.trained import trained_parameters
from engine.runs.figures import binary_bytes

_BYTES_PER_PARAMETER = 3 * 4  # the master weight and two moments; moments of 8 bits are saved as fp32, too


@dataclass(frozen=True)
class Shortage:
    """Too little room for checkpoints. is_total: not even one fits. remedy: what to do, as part of a sentence."""

    text: str
    remedy: str
    is_total: bool


def checkpoint_bytes(config: RunConfig) -> int:
    """The size of one checkpoint: fp32 weights and both moments of what is trained, whatever ranks write which part."""
    return _BYTES_PER_PARAMETER * trained_parameters(config.model)


def saves_checkpoints(config: RunConfig) -> bool:
    """Whether ranks of this run write any."""
    return config.train.checkpoint.is_on and not config.train.evaluate_only


def find_shortage(config: RunConfig, folder: str, free: int, share: float = 1.0) -> Shortage | None:
    """What is wrong where `folder` has `free` bytes for checkpoints of this run; None: they fit, or none are written.

    share: the part of each checkpoint that is written to this disk. Ranks hold equal parts of the weights, so it is
    the share of the nodes whose disk this is, within the rounding of a tensor's first dimension over the ranks.
    """
    if not saves_checkpoints(config):
        return None
    settings = config.train.checkpoint
    size = round(share * checkpoint_bytes(config))
    # A new one is written before the oldest is deleted.
    number = settings.keep_last + 1 if settings.is_periodic else 1
    if free >= number * size:
        return None
    part = "a checkpoint" if share >= 1 else "its part of a checkpoint"
    together = f", up to {number} at a time {binary_bytes(number * size)}" if number > 1 else ""
    text = f"{part} takes {binary_bytes(size)}{together}, but {folder} has {binary_bytes(free)} free"
    if free >= size:
        remedy = "free space, name another folder with train.checkpoint.folder, or lower train.checkpoint.keep_last"
        return Shortage(text, remedy, is_total=False)
    again = "free space, then launch again (a run that has begun: `burst resume`)"
    return Shortage(text, f"{again}, or name another folder with train.checkpoint.folder", is_total=True)
