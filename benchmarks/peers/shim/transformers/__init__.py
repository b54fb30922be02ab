"""Stands in for transformers: ring-flash-attn 0.1.8 imports its adapter for it at start, which needs a function that
transformers 5 no longer has. The comparison does not use the adapter.
"""
