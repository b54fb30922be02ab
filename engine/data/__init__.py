"""Text -> packed samples of token ids, without torch: sources, tokenizers, memory-mapped shards, sampler.

Read in this order: sources.py (text), split.py (training or validation), tokenizers.py (ids), manifest.py, writer.py
and shards.py (files), build.py and prepare.py (all of it together), sampler.py (batches).
"""

from __future__ import annotations

from engine.data.prepare import PreparedData, open_prepared, prepare
from engine.data.progress import Progress, ProgressCallback
from engine.data.sampler import Batch, PackedSampler, sequential_batches
from engine.data.shards import TokenShards, open_token_set
from engine.data.stats import unigram_bits_per_byte

__all__ = [
    "Batch",
    "PackedSampler",
    "PreparedData",
    "Progress",
    "ProgressCallback",
    "TokenShards",
    "open_prepared",
    "open_token_set",
    "prepare",
    "sequential_batches",
    "unigram_bits_per_byte",
]
