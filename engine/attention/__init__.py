"""Distributed attention as data: masks, layouts, plans, one executor for every method.

For other people's models (docs/library.md):

    from engine.attention import ContextParallel, Mask, attention

The three names load torch or numpy when they are first used, so planning modules of this package stay free of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.attention.context import SequenceContext, attention
    from engine.attention.library import ContextParallel
    from engine.planning.sequence.mask import Mask

__all__ = ["ContextParallel", "Mask", "SequenceContext", "attention"]
# Where each of them is: loaded when it is first asked for.
_HOMES = {
    "ContextParallel": "engine.attention.library",
    "Mask": "engine.planning.sequence.mask",
    "SequenceContext": "engine.attention.context",
    "attention": "engine.attention.context",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
