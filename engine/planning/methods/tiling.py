"""Which runs work on their layers a tile of rows at a time. Standard library only.

`engine.model.checkpointed` does it; FLOPs, memory plans and checks of the configuration must know it, too.
"""

from __future__ import annotations

from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.planning.methods.presets import AttentionMethod


def tile_tokens_of(config: RunConfig, method: AttentionMethod) -> int | None:
    """Rows per tile of the layers of a run; None: not tiled. Raises ConfigError where they cannot be."""
    tile_tokens = config.memory.tile_tokens or method.chunk_tokens
    if tile_tokens is None and method.preset == "alst":
        tile_tokens = config.model.hidden_size  # a tile of the MLP is then about as large as one of its matrices
    if tile_tokens is not None and config.parallel.tp_size > 1:
        raise ConfigError(
            f"memory.tile_tokens, attention.chunk_tokens: layers run {tile_tokens} rows at a time, but "
            f"parallel.tp_size={config.parallel.tp_size} gathers the rows of several ranks inside a layer; "
            "set parallel.tp_size=1, or leave both null"
        )
    return tile_tokens
