"""Builds named masks: windows with sinks, and block-sparse patterns as `BlockList`s. No torch.

    6 blocks, causal       strided, stride 3, local 2    vertical_slash, columns (0,), diagonals (0, 3)
    query block 0          x                             x
                1          x x                           x x
                2          . x x                         x . x
                3          . . x x                       x . . x
                4          . . x x x                     x x . . x
                5          . . x . x x                   x . x . . x

strided: every `block_stride`-th key block and the nearest ones (Abdin et al. 2024, Phi-3-small; "fixed" in Child et al.
2019). vertical_slash: columns that all see and block diagonals (Jiang et al. 2024, MInference). sink_window: exact in
tokens (Xiao et al. 2023). All compose with causality, windows and documents.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MaskKind
from engine.planning.visibility.mask import BlockList, BlockRectangle, Mask
from engine.planning.visibility.options import mask_problems

Blocks = npt.NDArray[np.int64]
DEFAULT_BLOCK_TOKENS = 128


def build_mask(kind: MaskKind, seq_len: int, options: AttentionConfig, documents: Sequence[int] = ()) -> Mask:
    """Build the mask of this name over `seq_len` tokens; `documents` are ascending start positions, the first 0.

    All kinds but `full` are causal, and each takes different options; `no_attention` hides all. Reads `blocks_file`.
    Raises ConfigError.
    """
    problems = list(mask_problems(options, {kind}))
    if problems:
        raise ConfigError(problems)
    return Mask(
        seq_len,
        causal=kind != "full",
        window=options.window_tokens if kind in ("window", "sink_window") else None,
        documents=tuple(documents),
        blocks=_build_blocks(kind, seq_len, options),
        sink=options.sink_tokens if kind == "sink_window" else 0,
        query_stop=0 if kind == "no_attention" else None,
    )


def _build_blocks(kind: MaskKind, seq_len: int, options: AttentionConfig) -> BlockList | None:
    if kind == "blocks":
        assert options.blocks_file is not None
        return read_blocks(Path(options.blocks_file).expanduser(), seq_len, options.block_tokens)
    block_tokens = options.block_tokens or DEFAULT_BLOCK_TOKENS
    num_blocks = -(-seq_len // block_tokens)
    if kind == "strided":
        return strided_blocks(num_blocks, block_tokens, options.block_stride, options.local_blocks)
    if kind == "vertical_slash":
        return vertical_slash_blocks(num_blocks, block_tokens, options.vertical_blocks, options.slash_blocks)
    return None


def strided_blocks(num_blocks: int, block_tokens: int, block_stride: int, local_blocks: int) -> BlockList:
    """Query block a sees key block b <= a iff b is the last of its group of `block_stride`, or a - b < local_blocks."""
    if block_stride == 1:
        local_blocks = num_blocks
    nearest = [BlockRectangle(a, a + 1, max(0, a - local_blocks + 1), a + 1) for a in range(num_blocks)]
    columns = range(block_stride - 1, num_blocks - local_blocks, block_stride)
    shared = [BlockRectangle(b + local_blocks, num_blocks, b, b + 1) for b in columns]
    return BlockList(block_tokens, (*nearest, *shared))


def vertical_slash_blocks(
    num_blocks: int, block_tokens: int, vertical_blocks: Sequence[int], slash_blocks: Sequence[int]
) -> BlockList:
    """Query block a sees key block b <= a iff b is in `vertical_blocks`, or a - b in `slash_blocks`."""
    row = np.arange(num_blocks, dtype=np.int64)[:, None]
    columns, distances = _runs(vertical_blocks), _runs(slash_blocks)
    zero = np.zeros_like(row)
    first = np.concatenate([columns[:, 0] + zero, row + 1 - distances[:, 1]], axis=1)
    stop = np.concatenate([columns[:, 1] + zero, row + 1 - distances[:, 0]], axis=1)
    return BlockList.from_runs(block_tokens, *_united(np.maximum(0, first), np.minimum(stop, row + 1)))


def _runs(blocks: Sequence[int]) -> Blocks:
    """Return ranges [first, stop) of consecutive numbers, [n, 2]."""
    numbers = np.unique(np.array(blocks, dtype=np.int64))
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = [part for part in np.split(numbers, edges) if len(part)]
    return np.array([(part[0], part[-1] + 1) for part in parts], dtype=np.int64).reshape(-1, 2)


def _united(first: Blocks, stop: Blocks) -> tuple[Blocks, Blocks, Blocks]:
    """Return row, first and stop of the fewest runs with the same union as the runs [first, stop) per row [rows, n]."""
    nowhere = 1 + (int(stop.max()) if stop.size else 0)
    empty = first >= stop
    first, stop = np.where(empty, nowhere, first), np.where(empty, nowhere, stop)
    order = np.argsort(first, axis=1)
    first, reach = np.take_along_axis(first, order, 1), np.take_along_axis(stop, order, 1)
    np.maximum.accumulate(reach, axis=1, out=reach)
    begins = np.ones_like(first, dtype=np.bool_)
    begins[:, 1:] = first[:, 1:] > reach[:, :-1]
    at = np.flatnonzero(begins)
    stops = reach.ravel()[np.append(at[1:], first.size)[: len(at)] - 1]
    firsts = first.ravel()[at]
    rows = at // max(1, first.shape[1])
    some = firsts < nowhere
    return rows[some], firsts[some], stops[some]


def read_blocks(path: Path, seq_len: int, block_tokens: int | None = None) -> BlockList:
    """Read the block list of a file. Raises ConfigError with all its problems.

    .json   {"block_tokens": 128, "pairs": [[query block, key block], ...]}
    .npz    arrays `block_tokens` (one integer) and `pairs` [n, 2], integers
    .npy    `pairs` alone; `block_tokens` must then be given

    A size given both ways must agree. Pairs above the diagonal are legal and see nothing under a causal mask.
    """
    found, pairs = _read_file(path)
    problems = []
    if found is not None and block_tokens is not None and found != block_tokens:
        problems.append(f"{path}: its block_tokens is {found}, attention.block_tokens {block_tokens}; drop one of them")
    size = found if found is not None else block_tokens
    if size is None:
        problems.append(f"{path}: has no block_tokens; set attention.block_tokens")
    elif size < 1:
        problems.append(f"{path}: block_tokens is {size}; at least 1 is needed")
    elif len(pairs):
        num_blocks = -(-seq_len // size)
        outside = pairs[((pairs < 0) | (pairs >= num_blocks)).any(axis=1)]
        if len(outside):
            problems.append(
                f"{path}: {len(outside)} pairs lie outside the {num_blocks} blocks of {seq_len} tokens, "
                f"the first is {tuple(outside[0].tolist())}"
            )
    if not len(pairs):
        problems.append(f"{path}: lists no pair; no token would see anything")
    if problems or size is None:
        raise ConfigError(problems)
    return BlockList.from_pairs(size, pairs)


# Of a .npz whose bytes are cut off or changed zipfile raises BadZipFile, zlib.error, EOFError, or NotImplementedError
# for a way of packing that there is not; json RecursionError; numpy the others. They have no common base but Exception.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, BadZipFile, zlib.error)


def _read_file(path: Path) -> tuple[int | None, Blocks]:
    """Read block_tokens (None: not given) and pairs [n, 2] of a file."""
    readers = {".json": _read_json, ".npz": _read_npz, ".npy": _read_npy}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a block list is a file of type {', '.join(readers)}")
    try:
        block_tokens, pairs = readers[path.suffix](path)
        array = np.asarray(pairs)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: not a block list: {error}") from error
    if array.size == 0:
        array = array.astype(np.int64).reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{path}: pairs are {array.dtype} of shape {array.shape}; expected integers of shape (n, 2)")
    if block_tokens is not None and (isinstance(block_tokens, bool) or not isinstance(block_tokens, int)):
        raise ConfigError(f"{path}: block_tokens is {block_tokens!r}; expected one integer")
    return block_tokens, array.astype(np.int64)


def _read_json(path: Path) -> tuple[Any, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not isinstance(document.get("pairs"), list):
        raise ValueError('expected an object with a list "pairs"')
    unknown = sorted(document.keys() - {"block_tokens", "pairs"})
    if unknown:
        raise ValueError(f"unknown keys {', '.join(unknown)}; legal are block_tokens and pairs")
    return document.get("block_tokens"), document["pairs"]


def _read_npz(path: Path) -> tuple[Any, Any]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        block_tokens = archive["block_tokens"].tolist() if "block_tokens" in archive else None
        return block_tokens, archive["pairs"]


def _read_npy(path: Path) -> tuple[Any, Any]:
    return None, np.load(path, allow_pickle=False)
