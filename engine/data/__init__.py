"""Text -> packed samples of token ids, without torch: sources, tokenizers, memory-mapped shards, sampler.

Read in this order: sources.py (text), chat.py (conversations), tokenizers.py (ids), manifest.py and shards.py (files),
build.py and prepare.py (all of it together), sampler.py (batches).
"""

from __future__ import annotations

from engine.data.build import Progress, ProgressCallback
from engine.data.prepare import PreparedData, TrainingData, open_prepared, open_training_data, prepare
from engine.data.sampler import Batch, LengthClass, LengthRule, Sampler, Samples, length_classes, sequential_batches
from engine.data.shards import TokenShards, open_token_set

__all__ = [
    "Batch",
    "LengthClass",
    "LengthRule",
    "PreparedData",
    "Progress",
    "ProgressCallback",
    "Sampler",
    "Samples",
    "TokenShards",
    "TrainingData",
    "length_classes",
    "open_prepared",
    "open_token_set",
    "open_training_data",
    "prepare",
    "sequential_batches",
]
