"""Checks the settings of named masks. Standard library only: configurations are checked before numpy is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.config.settings import AttentionConfig, MaskKind


def mask_problems(attention: AttentionConfig, kinds: Collection[MaskKind]) -> Iterator[str]:
    """Yield the problems of masks of these kinds, one sentence each."""
    if attention.window_tokens is None and not {"window", "sink_window"}.isdisjoint(kinds):
        yield (
            "attention.window_tokens: null, but a windowed mask is configured; set the number of keys that a token "
            "attends to, such as attention.window_tokens=4096"
        )
    if attention.blocks_file is None and "blocks" in kinds:
        yield "attention.blocks_file: null, but attention.mask=blocks reads its list of blocks from a file; name one"
    if "vertical_slash" in kinds and min(attention.vertical_blocks, default=0) < 0:
        yield f"attention.vertical_blocks: got {attention.vertical_blocks}, but blocks count from 0"
    if "vertical_slash" in kinds and min(attention.slash_blocks, default=1) != 0:
        yield (
            f"attention.slash_blocks: got {attention.slash_blocks}, expected distances from 0 on, since a token must "
            "attend to itself"
        )
