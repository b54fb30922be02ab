"""Which runs work on their layers a tile of rows at a time. Standard library only.

`engine.model.chunked` does it; FLOPs and checks of the configuration must know it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.presets import AttentionMethod
from engine.config import RunConfig
from engine.errors import ConfigError
from engine.flops import Recomputed


@dataclass(frozen=True)
class Tiling:
    """Rows per tile, and whether attention's results are kept for backward or computed again."""

    tile_tokens: int
    keep_attention: bool


def layer_tiling(config: RunConfig, method: AttentionMethod) -> Tiling | None:
    """How the layers of a run are tiled; None: not at all. Raises ConfigError where they cannot be.

    What lies in host memory is kept; what lies on the device is computed again under activation_checkpoint=full.
    """
    tile_tokens = config.memory.tile_tokens or method.chunk_tokens
    if tile_tokens is None and method.preset == "alst":
        tile_tokens = config.model.hidden_size  # a tile of the MLP is then about as large as one of its matrices
    if tile_tokens is None:
        return None
    if config.parallel.tp_size > 1:
        raise ConfigError(
            f"memory.tile_tokens, attention.chunk_tokens: layers run {tile_tokens} rows at a time, but "
            f"parallel.tp_size={config.parallel.tp_size} gathers the rows of several ranks inside a layer; "
            "set parallel.tp_size=1, or leave both null"
        )
    keep = method.chunk_store == "host" or config.memory.activation_checkpoint != "full"
    return Tiling(tile_tokens, keep)


def recomputed_by(config: RunConfig, method: AttentionMethod) -> Recomputed:
    """What the backward pass computes again."""
    tiling = layer_tiling(config, method)
    if tiling is None:
        return config.memory.activation_checkpoint
    return "tiles" if tiling.keep_attention else "tiles_and_attention"
