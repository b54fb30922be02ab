"""Text -> packed samples of token ids, without torch: sources, tokenizers, memory-mapped shards, sampler.

Read in this order: sources.py (text), chat.py (conversations), tokenizers.py (ids), manifest.py and shards.py (files),
build.py and prepare.py (all of it together), sampler.py (batches).
"""
