"""Specifications of measurements: variants of attention as text, cells of one mask and one length.

Standard library and the configuration only: the command line makes these values, every rank reads them back from JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from engine.config.cluster import ClusterConfig
from engine.config.errors import ConfigError
from engine.config.schema import read_dataclass, to_plain
from engine.config.settings import AttentionConfig, Dtype, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from engine.config.yaml_text import load_yaml
from engine.planning.methods.presets import PRESETS
from engine.resolve.legality import check_run

CELL_FILE = "cell.json"
RESULT_FILE = "result.json"
Backend = Literal["auto", "nccl", "gloo"]


@dataclass(frozen=True)
class RankSetup:
    """The measuring processes: `ranks` of them on `nodes` (emulated on this machine by default), threads per rank."""

    ranks: int
    nodes: int = 1
    threads: int = 1
    backend: Backend = "gloo"

    @property
    def local_ranks(self) -> int:
        """The number of ranks per node."""
        return self.ranks // self.nodes

    @property
    def cluster(self) -> ClusterConfig:
        """The cluster settings of this setup."""
        return ClusterConfig(ranks_per_node=self.ranks, topology_nodes=self.nodes, backend=self.backend)

    def __post_init__(self) -> None:
        if self.ranks % self.nodes:
            legal = ", ".join(str(n) for n in range(1, self.ranks + 1) if self.ranks % n == 0)
            raise ConfigError(f"bench: got {self.nodes} nodes for {self.ranks} ranks; legal numbers of nodes: {legal}")


@dataclass(frozen=True)
class HeadShape:
    """Heads of the measured attention, and the dtype of q, k, v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Dtype = "bfloat16"


@dataclass(frozen=True)
class Rounds:
    """How often every variant is called: `warmup` times unmeasured, then `repeats` times measured."""

    repeats: int
    warmup: int = 1


@dataclass(frozen=True)
class AttentionCell:
    """Variants of attention under one mask at one length, measured one after another by one group of ranks.

    `variants` and `mask` are points, NAME[:FIELD=VALUE]...: a preset or a mask, and fields of the configuration group
    `attention`, as in burst:backward_circulates=q or window:window_tokens=1024.
    """

    variants: tuple[str, ...]
    mask: str
    seq_len: int
    setup: RankSetup
    shape: HeadShape
    rounds: Rounds

    def run_config(self, variant: str) -> RunConfig:
        """Return the checked configuration of a variant in this cell. Raises ConfigError with all violated rules."""
        shape, setup = self.shape, self.setup
        config = RunConfig(
            model=ModelConfig(num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim),
            attention=read_attention(variant, self.mask),
            parallel=ParallelConfig(),
            train=TrainConfig(seq_len=self.seq_len, compute_dtype=shape.dtype),
            cluster=setup.cluster,
        )
        check_run(config)
        return config

    def legal_variants(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return (variants that this cell can measure, reason by name for all others)."""
        legal, skipped = [], {}
        for variant in self.variants:
            try:
                self.run_config(variant)
            except ConfigError as error:
                skipped[variant] = "; ".join(error.problems)
            else:
                legal.append(variant)
        return tuple(legal), skipped


@dataclass(frozen=True)
class MachineCell:
    """A measurement of this machine by concurrent ranks; `window_s`: duration of a series of equal calls."""

    setup: RankSetup
    shape: HeadShape
    window_s: float

    def model(self, hidden_size: int, layers: int) -> ModelConfig:
        """Return a model of this width with the measured head size."""
        heads = max(1, hidden_size // self.shape.head_dim)
        return ModelConfig(
            vocab_size=256,  # so small that its messages take no time
            hidden_size=hidden_size,
            ffn_hidden_size=8 * hidden_size // 3,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=self.shape.head_dim,
        )

    def run_config(self, layers: int, hidden_size: int | None = None) -> RunConfig:
        """Return a checked training run; without `hidden_size` so small that only the host takes time."""
        setup = self.setup
        config = RunConfig(
            model=self.model(hidden_size or self.shape.head_dim, layers),
            attention=AttentionConfig(preset="ring"),
            train=TrainConfig(seq_len=64 * setup.ranks, compute_dtype=self.shape.dtype),
            cluster=setup.cluster,
        )
        check_run(config)
        return config


CellT = TypeVar("CellT")


def split_point(text: str) -> tuple[str, dict[str, Any]]:
    """Parse NAME[:FIELD=VALUE]... into (name, fields); values are YAML scalars."""
    name, *parts = text.split(":")
    fields = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(f"bench: {text!r}: expected NAME[:FIELD=VALUE]..., got {part!r} after the name")
        fields[key] = load_yaml(value)
    return name, fields


def read_attention(variant: str, mask: str) -> AttentionConfig:
    """Return the attention settings of a variant under a mask. Raises ConfigError with every mistake."""
    preset, fields = split_point(variant)
    if preset not in PRESETS:
        raise ConfigError(f"bench: {preset!r} is no preset of attention; legal: {', '.join(PRESETS)}")
    kind, mask_fields = split_point(mask)
    config, problems = read_dataclass(AttentionConfig, {"preset": preset, "mask": kind} | mask_fields | fields)
    if problems:
        raise ConfigError([f"bench: {variant} under mask {mask}: {problem.text}" for problem in problems])
    assert isinstance(config, AttentionConfig)
    return config


def check_points(variants: Iterable[str], masks: Iterable[str]) -> None:
    """Raise ConfigError for mistakes that no length or number of ranks could make legal: misspelt names and fields."""
    variants = list(variants)
    for mask in masks:
        for variant in variants:
            read_attention(variant, mask)


def write_cell(cell: object, folder: Path) -> None:
    """Write a cell, a dataclass with a `setup`, to the folder that the ranks read."""
    (folder / CELL_FILE).write_text(json.dumps(to_plain(cell)))


def read_cell(cls: type[CellT], folder: Path) -> CellT:
    """Read the cell that `write_cell` wrote."""
    cell, _ = read_dataclass(cls, json.loads((folder / CELL_FILE).read_text()))
    return cell
