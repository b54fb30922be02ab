"""Machines: known by name or read from a profile, changed by field, never impossible."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.errors import ConfigError
from engine.predict.machine import find_machine, profile_document


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("h10", {}, ["'h10'", "a profile such as machine.json", "one of cpu, gb200, b200", "did you mean h100?"]),
        ("h100", {"inter_bytes": 1.0}, ["no such field: inter_bytes", "did you mean inter_bytes_per_s?"]),
        ("h100", {"inter_bytes_per_s": 0.0}, ["inter_bytes_per_s is 0.0", "more than 0"]),
        ("h100", {"host_bytes_per_s": math.nan}, ["host_bytes_per_s is nan"]),
        ("h100", {"inter_latency_s": -1.0}, ["inter_latency_s is -1.0", "0 or more"]),
    ],
)
def test_an_impossible_machine_is_refused(name: str, changes: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_machine(name, changes)
    for word in words:
        assert word in str(caught.value)


MEASURED = replace(
    find_machine("cpu"),
    matmul_flops_per_s=100e9,
    matmul_shares=((64, 0.25), (256, 0.75), (1024, 1.0)),
    forward_shares=((128, 0.5), (2048, 1.0)),
    local_ranks=2,
    layer_overhead_s=1e-3,
    host_memory_bytes=8 * 10**9,
    fp32_peak=120e9,
)


def profile(folder: Path, **changes: Any) -> Path:
    """A profile with some figures of its machine changed."""
    path = folder / "machine.json"
    document = profile_document(MEASURED, {"date": "2026-11-25"})
    document["machine"] |= changes
    path.write_text(json.dumps(document))
    return path


def test_a_profile_is_a_machine_like_those_of_the_table(tmp_path: Path) -> None:
    path = profile(tmp_path)
    assert find_machine(str(path)) == replace(MEASURED, name=str(path))
    assert find_machine(str(path), {"shared_nic": True}).shared_nic


@pytest.mark.parametrize(
    ("size", "share"),
    [(1, 0.25), (64, 0.25), (128, 0.5), (256, 0.75), (512, 0.875), (1024, 1.0), (4096, 1.0)],
)
def test_a_rate_between_two_measured_sizes_follows_the_logarithm_of_the_size(size: int, share: float) -> None:
    assert MEASURED.product_flops_per_s(size) == pytest.approx(share * 100e9)


def test_ranks_that_share_cores_share_their_rates() -> None:
    eight = MEASURED.shared_by(8)
    assert eight.matmul_flops_per_s == pytest.approx(25e9)
    assert eight.layer_overhead_s == pytest.approx(4 * 1e-3)
    assert eight.shared_by(2).tile_overhead_s == pytest.approx(MEASURED.tile_overhead_s)


def test_ranks_that_share_cores_keep_their_network() -> None:
    assert MEASURED.shared_by(8).inter_bytes_per_s == MEASURED.inter_bytes_per_s


def test_ranks_of_gpus_share_nothing() -> None:
    assert find_machine("h100").shared_by(8, 4) == find_machine("h100")


def test_cpu_of_the_table_is_one_thread() -> None:
    core = find_machine("cpu")
    rate = core.matmul_flops_per_s
    assert core.shared_by(4, 3).matmul_flops_per_s == pytest.approx(3 * rate)
    assert core.shared_by(4).tile_overhead_s == core.tile_overhead_s
    assert core.shared_by(4, 1, cores=2).matmul_flops_per_s == pytest.approx(rate / 2)
    assert core.shared_by(2, 3, cores=64).matmul_flops_per_s == pytest.approx(3 * rate)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"matmul_flops_per_s": "fast"}, ["matmul_flops_per_s is 'fast', expected a number"]),
        (
            {"matmul_flops_per_s": -1.0, "intra_latency_s": -2.0},
            ["matmul_flops_per_s is -1.0", "intra_latency_s is -2"],
        ),
        ({"matmul_flop_per_s": 1.0}, ["matmul_flop_per_s: no such setting", "did you mean matmul_flops_per_s?"]),
        ({"matmul_shares": [[256, 1.0], [64, 0.5]]}, ["matmul_shares", "sizes ascending"]),
    ],
)
def test_a_damaged_profile_is_refused_with_all_that_is_wrong(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    path = profile(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        find_machine(str(path))
    for word in [str(path), "burst bench machine", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no profile"),
        ('{"results": []}', "is no profile"),
        ('{"profile_version": 7, "machine": {}}', "version 7, expected 1"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str | None, word: str) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        find_machine(str(path))
