"""Text -> packed samples of token ids, without torch: sources, tokenizers, memory-mapped shards, sampler.

Read in this order: sources.py (text), chat.py (conversations), split.py (training or validation), tokenizers.py (ids),
manifest.py, writer.py and shards.py (files), build.py and prepare.py (all of it together), sampler.py, lengths.py and
mixture.py (batches).
"""

from __future__ import annotations

from engine.data.build import Progress, ProgressCallback
from engine.data.lengths import LengthClass, LengthRule, length_classes
from engine.data.mixture import TrainingData, open_training_data
from engine.data.prepare import PreparedData, open_prepared, prepare
from engine.data.sampler import Batch, Sampler, Samples, sequential_batches
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
