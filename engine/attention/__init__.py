"""Distributed attention as data: masks, layouts, plans, one executor for every method.

For other people's models (docs/library.md):

    from engine.attention import ContextParallel, Mask, attention

Masks, layouts and plans are made by `engine.planning`, which needs no torch.
"""

from engine.attention.context import SequenceContext, attention
from engine.attention.latent_calls import latent_attention
from engine.attention.library import ContextParallel
from engine.planning.program.ops import LatentShape
from engine.planning.visibility.mask import Mask

__all__ = ["ContextParallel", "LatentShape", "Mask", "SequenceContext", "attention", "latent_attention"]
