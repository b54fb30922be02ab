"""Masks by name: windows with sinks, and block-sparse patterns as `BlockList`s.

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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from engine.config.errors import ConfigError
from engine.config.settings import MaskKind
from engine.planning.sequence.mask import Mask
from engine.planning.sequence.rectangles import BlockList, BlockRectangle

__all__ = [
    "OPTIONAL_OPTIONS",
    "REQUIRED_OPTIONS",
    "MaskKind",
    "MaskOptions",
    "build_mask",
    "check_mask_options",
    "read_blocks",
    "strided_blocks",
    "vertical_slash_blocks",
]

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MaskOptions:
    """What a kind of mask needs besides its name; None: not given. Names are those of the `attention` settings.

    window_tokens     how far a query looks back, itself included
    sink_tokens       first keys of every document that are always visible
    block_tokens      tokens per block
    block_stride      strided: every how many key blocks one is seen by all
    local_blocks      strided: nearest key blocks that are seen, the query's own included
    vertical_blocks   vertical_slash: key blocks that all later queries see
    slash_blocks      vertical_slash: distances in blocks at which a query sees a key block; 0 is its own
    blocks_file       blocks: .json, .npz or .npy file of (query block, key block) pairs
    """

    window_tokens: int | None = None
    sink_tokens: int | None = None
    block_tokens: int | None = None
    block_stride: int | None = None
    local_blocks: int | None = None
    vertical_blocks: tuple[int, ...] | None = None
    slash_blocks: tuple[int, ...] | None = None
    blocks_file: str | None = None


REQUIRED_OPTIONS: dict[MaskKind, tuple[str, ...]] = {
    "causal": (),
    "full": (),
    "window": ("window_tokens",),
    "sink_window": ("window_tokens", "sink_tokens"),
    "strided": ("block_tokens", "block_stride", "local_blocks"),
    "vertical_slash": ("block_tokens", "vertical_blocks", "slash_blocks"),
    "blocks": ("blocks_file",),
}
OPTIONAL_OPTIONS: dict[MaskKind, tuple[str, ...]] = {
    "strided": ("window_tokens", "sink_tokens"),
    "vertical_slash": ("window_tokens", "sink_tokens"),
    "blocks": ("window_tokens", "sink_tokens", "block_tokens"),
}


def build_mask(kind: MaskKind, seq_len: int, options: MaskOptions, documents: Sequence[int] = ()) -> Mask:
    """The mask of this name over `seq_len` tokens; `documents` are ascending start positions, the first 0.

    All kinds but `full` are causal. ConfigError lists every missing, useless or senseless option at once. Reads
    `blocks_file`.
    """
    problems = check_mask_options(kind, options)
    try:
        Mask(seq_len, documents=tuple(documents))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Mask(
        seq_len,
        causal=kind != "full",
        window=options.window_tokens,
        documents=tuple(documents),
        blocks=_build_blocks(kind, seq_len, options),
        sink=options.sink_tokens or 0,
    )


def check_mask_options(kind: MaskKind, options: MaskOptions) -> list[str]:
    """One sentence per missing, useless or senseless option; reads no file."""
    if kind not in get_args(MaskKind):
        return [f"attention.mask: got {kind!r}; legal are {', '.join(get_args(MaskKind))}"]
    required, optional = REQUIRED_OPTIONS[kind], OPTIONAL_OPTIONS.get(kind, ())
    problems = []
    for field in fields(options):
        name, value = field.name, getattr(options, field.name)
        if value is None and name in required:
            problems.append(f"attention.{name} is not set; mask {kind} needs it")
        elif value is not None and name not in (*required, *optional):
            users = [k for k in get_args(MaskKind) if name in (*REQUIRED_OPTIONS[k], *OPTIONAL_OPTIONS.get(k, ()))]
            problems.append(f"attention.{name} is {value}; mask {kind} has no use for it, only {', '.join(users)}")
        elif value is not None:
            problems += _value_problems(name, value)
    if options.sink_tokens is not None and options.window_tokens is None and "window_tokens" in optional:
        problems.append(f"attention.sink_tokens is {options.sink_tokens}, but without window_tokens nothing is hidden")
    return problems


def _value_problems(name: str, value: Any) -> list[str]:
    if isinstance(value, int) and value < 1:
        return [f"attention.{name} is {value}; at least 1 is needed"]
    if isinstance(value, tuple) and any(block < 0 for block in value):
        return [f"attention.{name} is {value}; blocks count from 0"]
    if name == "slash_blocks" and 0 not in value:
        return [f"attention.{name} is {value}; it must hold 0, or no token would see itself"]
    return []


def _build_blocks(kind: MaskKind, seq_len: int, options: MaskOptions) -> BlockList | None:
    if kind == "blocks":
        assert options.blocks_file is not None
        return read_blocks(Path(options.blocks_file).expanduser(), seq_len, options.block_tokens)
    if kind not in ("strided", "vertical_slash"):
        return None
    assert options.block_tokens is not None
    num_blocks = -(-seq_len // options.block_tokens)
    if kind == "strided":
        assert options.block_stride is not None
        assert options.local_blocks is not None
        return strided_blocks(num_blocks, options.block_tokens, options.block_stride, options.local_blocks)
    assert options.vertical_blocks is not None
    assert options.slash_blocks is not None
    return vertical_slash_blocks(num_blocks, options.block_tokens, options.vertical_blocks, options.slash_blocks)


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
    """Ranges [first, stop) of consecutive numbers, [n, 2]."""
    numbers = np.unique(np.array(blocks, dtype=np.int64))
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    parts = [part for part in np.split(numbers, edges) if len(part)]
    return np.array([(part[0], part[-1] + 1) for part in parts], dtype=np.int64).reshape(-1, 2)


def _united(first: Blocks, stop: Blocks) -> tuple[Blocks, Blocks, Blocks]:
    """(row, first, stop) of the fewest runs with the same union as runs [first, stop) of every row [rows, n]."""
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
    """The block list of a file; ConfigError names the file and everything wrong with it.

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
        problems.append(f"{path}: says no block_tokens; set attention.block_tokens")
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
    """(block_tokens or None, pairs [n, 2]) of a file."""
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
