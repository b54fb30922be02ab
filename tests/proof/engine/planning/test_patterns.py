"""Named masks equal their definitions; block lists from files are checked; few large tiles compute what is listed."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.attention_oracle import block_pairs, num_pairs, visible

from engine.config.errors import ConfigError
from engine.config.settings import AttentionConfig, MaskKind
from engine.planning.visibility.layout import build_layout
from engine.planning.visibility.mask import BlockList, BlockRectangle, Mask
from engine.planning.visibility.patterns import build_mask, read_blocks, strided_blocks, vertical_slash_blocks
from engine.planning.visibility.visible import Visibility

PAIRS = st.frozensets(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=60)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 45))
def test_strided_blocks_follow_their_definition(num_blocks: int, stride: int, local: int) -> None:
    expected = {(a, b) for a in range(num_blocks) for b in range(a + 1) if b % stride == stride - 1 or a - b < local}
    assert_disjoint_cover(strided_blocks(num_blocks, 8, stride, local), expected)


BLOCKS = st.sets(st.integers(0, 45), max_size=8)


@given(st.integers(1, 40), BLOCKS, BLOCKS)
def test_vertical_slash_blocks_follow_their_definition(num_blocks: int, vertical: set[int], slash: set[int]) -> None:
    expected = {(a, b) for a in range(num_blocks) for b in range(a + 1) if b in vertical or a - b in slash}
    assert_disjoint_cover(vertical_slash_blocks(num_blocks, 8, tuple(vertical), tuple(slash)), expected)


@given(PAIRS)
def test_rectangles_hold_every_listed_pair_once(pairs: frozenset[tuple[int, int]]) -> None:
    assert_disjoint_cover(BlockList.from_pairs(4, pairs), set(pairs))


def assert_disjoint_cover(blocks: BlockList, expected: set[tuple[int, int]]) -> None:
    assert block_pairs(blocks) == expected
    assert sum((r.q_stop - r.q_first) * (r.k_stop - r.k_first) for r in blocks.rectangles) == len(expected)


def test_a_dense_list_is_one_rectangle() -> None:
    pairs = [(a, b) for a in range(5) for b in range(7)]
    assert BlockList.from_pairs(4, pairs).rectangles == (BlockRectangle(0, 5, 0, 7),)


# ---- masks by name --------------------------------------------------------------------------------------------------

OPTIONS = AttentionConfig(
    window_tokens=7,
    sink_tokens=2,
    block_tokens=4,
    block_stride=3,
    local_blocks=2,
    vertical_blocks=(0,),
    slash_blocks=(0, 1, 4),
    blocks_file="blocks.json",
)


@pytest.fixture
def in_folder_with_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    content = {"block_tokens": 4, "pairs": [[a, b] for a in range(10) for b in range(10) if a % 3 == b % 3]}
    (tmp_path / "blocks.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seen_by_name(kind: MaskKind, q: int, k: int) -> bool:
    """The definition of every kind with OPTIONS, by itself."""
    a, b = q // 4, k // 4
    return {
        "causal": k <= q,
        "full": True,
        "window": k <= q < k + 7,
        "sink_window": k <= q and (q < k + 7 or k < 2),
        "strided": k <= q and (b % 3 == 2 or a - b < 2),
        "vertical_slash": k <= q and (b == 0 or a - b in (0, 1, 4)),
        "no_attention": False,
        "blocks": k <= q and a % 3 == b % 3,
    }[kind]


@pytest.mark.usefixtures("in_folder_with_blocks")
@pytest.mark.parametrize("documents", [(), (0, 1, 13)])
@pytest.mark.parametrize("kind", get_args(MaskKind))
def test_every_named_mask_is_applied_within_documents(kind: MaskKind, documents: tuple[int, ...]) -> None:
    mask = build_mask(kind, 38, OPTIONS, documents)
    for q, k in itertools.product(range(40), repeat=2):
        start, of_key = (max((s for s in documents if s <= x), default=0) for x in (q, k))
        # Sinks are the first tokens of a document, blocks count from the first token of all.
        moved = start if kind == "sink_window" else 0
        seen = start == of_key and seen_by_name(kind, q - moved, k - moved)
        assert visible(mask, q, k) == (max(q, k) < 38 and seen)


# ---- block lists from files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".npz", ".npy"])
def test_block_lists_are_read_from_files(tmp_path: Path, suffix: str) -> None:
    pairs = np.array([[0, 0], [1, 0], [1, 1], [3, 2]])
    path = tmp_path / f"blocks{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps({"block_tokens": 8, "pairs": pairs.tolist()}))
    elif suffix == ".npz":
        np.savez(path, block_tokens=8, pairs=pairs)
    else:
        np.save(path, pairs.astype(np.int32))
    blocks = read_blocks(path, 30, 8 if suffix == ".npy" else None)
    assert blocks.block_size == 8
    assert block_pairs(blocks) == {(0, 0), (1, 0), (1, 1), (3, 2)}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[[0, 0]]", 'expected an object with a list "pairs"'),
        ('{"pairs": [[0, 0]]', "not a block list"),
        ("[" * 100_000, "not a block list"),
        ('{"pairs": [[0, 0]]}', "has no block_tokens"),
        ('{"block_tokens": 8, "pairs": []}', "lists no pair"),
        ('{"block_tokens": 8, "pairs": [[0, 0, 1]]}', r"shape \(1, 3\)"),
        ('{"block_tokens": 8, "pairs": [[0], [1, 2]]}', "not a block list"),
        ('{"block_tokens": 8, "pairs": [[0, 0.5]]}', "expected integers"),
        ('{"block_tokens": 8, "pairs": [[0, 99], [4, -1]]}', r"2 pairs lie outside the 4 blocks .* first is \(0, 99\)"),
        ('{"block_tokens": 0, "pairs": [[0, 0]]}', "block_tokens is 0"),
        ('{"block_tokens": "8", "pairs": [[0, 0]]}', "expected one integer"),
        ('{"block_tokens": 8, "pairs": [[0, 0]], "blocksize": 3}', "unknown keys blocksize"),
    ],
)
def test_a_wrong_block_file_is_named_with_its_fault(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "blocks.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_blocks(path, 30)
    assert str(path) in str(caught.value)


def test_a_block_file_that_disagrees_with_the_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blocks.json"
    path.write_text('{"block_tokens": 8, "pairs": [[0, 0]]}')
    with pytest.raises(ConfigError, match=r"its block_tokens is 8, attention\.block_tokens 16"):
        read_blocks(path, 30, 16)


def test_damaged_block_files_raise_config_errors_alone(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "blocks.npz", pairs=np.zeros((40, 2), np.int64))
    whole = (tmp_path / "blocks.npz").read_bytes()
    for cut in range(0, len(whole) - 1, 7):  # a file that was copied in part, or damaged in the middle
        for damaged in (whole[:cut], whole[:cut] + b"\xff\xff\xff" + whole[cut + 3 :]):
            (tmp_path / "cut.npz").write_bytes(damaged)
            with contextlib.suppress(ConfigError):
                read_blocks(tmp_path / "cut.npz", 30, 8)


def test_files_without_a_block_list_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "blocks.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "blocks.txt").write_text("0 0")
    (tmp_path / "blocks.npz").write_bytes(b"PK broken")
    for name, problem in (("npy", "not a block list"), ("txt", "is a file of type"), ("npz", "not a block list")):
        with pytest.raises(ConfigError, match=problem):
            read_blocks(tmp_path / f"blocks.{name}", 30, 8)


def test_a_missing_block_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a block list"):
        read_blocks(tmp_path / "missing.json", 30)


# ---- tiles ----------------------------------------------------------------------------------------------------------

ROWS = 1 << 16
BLOCK = 512
ALL_CAUSAL = 128 * 129 // 2


def quarter_of_all_blocks() -> dict[str, BlockList]:
    """Patterns that list about a quarter of the causal block pairs."""
    listed = np.argwhere(np.tril(np.random.default_rng(0).random((128, 128)) < 0.25) | np.eye(128, dtype=np.bool_))
    return {
        "strided": strided_blocks(128, BLOCK, 5, 4),
        "vertical_slash": vertical_slash_blocks(128, BLOCK, (0, 1, 2, 3, 20, 50), (0, 1, 2, 3, 4, 10, 11, 20, 21, 22)),
        "listed": BlockList.from_pairs(BLOCK, listed),
    }


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("name", ["strided", "vertical_slash", "listed"])
def test_a_quarter_of_the_blocks_costs_at_most_three_tenths_of_all_tiles(name: str, layout: str) -> None:
    blocks = quarter_of_all_blocks()[name]
    assert 0.2 <= len([pair for pair in block_pairs(blocks) if pair[1] <= pair[0]]) / ALL_CAUSAL <= 0.27
    mask = Mask(ROWS, blocks=blocks)
    visibility = Visibility(mask, build_layout(layout, ROWS, 8, masks=(mask,)))  # type: ignore[arg-type]
    tiles = [band for q in range(8) for k in range(8) for band in visibility.bands(q, k)]
    # what a kernel computes: whole rectangles, and half of those that are causal
    computed = sum(tile.area() if tile.is_causal else tile.num_queries * tile.num_keys for tile in tiles)
    assert computed <= 0.3 * num_pairs(Mask(ROWS))


def test_patterns_of_ten_thousands_of_blocks_see_pairs() -> None:
    options = AttentionConfig(block_tokens=128, vertical_blocks=(0, 1, 9), slash_blocks=(0, 1, 2, 300))
    slashed = build_mask("vertical_slash", 1 << 22, options)
    strided = build_mask("strided", 1 << 22, AttentionConfig(block_tokens=128, block_stride=16, local_blocks=4))
    assert num_pairs(strided) + num_pairs(slashed) > 0
