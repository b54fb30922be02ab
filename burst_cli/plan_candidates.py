"""What `burst plan` plans: configurations, one per attention method, with what each will do or why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burst_cli.compose import compose
from burst_cli.conf_dirs import list_options, search_path
from engine.attention.auto import Candidate as RankedMethod
from engine.attention.auto import settle_auto
from engine.attention.preview import AttentionPreview, preview_attention
from engine.attention.topology import Topology
from engine.config import RunConfig
from engine.config_checks import known_cp_size
from engine.errors import ConfigError
from engine.flops import Flops, step_flops
from engine.simulate.machine import Machine
from engine.tiling import recomputed_by


@dataclass(frozen=True)
class Candidate:
    """A method by the name that was asked for: a preview with its configuration, or the rules that it violates."""

    name: str
    config: RunConfig | None = None
    preview: AttentionPreview | None = None
    problems: tuple[str, ...] = ()
    ranking: tuple[RankedMethod, ...] = ()  # what attention=auto chose from, best first

    @property
    def legal_preview(self) -> AttentionPreview:
        """The preview of a candidate that is legal."""
        assert self.preview is not None, self.problems
        return self.preview

    @property
    def legal_config(self) -> RunConfig:
        """The configuration of a candidate that is legal."""
        assert self.config is not None, self.problems
        return self.config

    @property
    def world_size(self) -> int:
        """All ranks of the run; those that share a sequence are `legal_preview.topology.size`."""
        return self.legal_preview.topology.size * _model_copies(self.legal_config)

    def flops(self) -> Flops:
        """FLOPs of one optimizer step over all ranks, pairs as the plan counts them."""
        config, preview = self.legal_config, self.legal_preview
        train = config.train
        groups = config.parallel.dp_replicate_size * config.parallel.dp_shard_size
        return step_flops(
            config.model,
            seq_len=train.seq_len,
            visible_pairs=round(preview.visible_pairs),
            sequences=groups * train.micro_batch_size * train.grad_accum_steps,
            recomputed=recomputed_by(config, preview.method),
        )

    def to_dict(self) -> dict[str, Any]:
        """The document of `burst plan --json`."""
        if self.preview is None:
            return {"preset": self.name, "legal": False, "problems": list(self.problems)}
        flops = self.flops()
        return {
            "preset": self.preview.method.preset,
            "legal": True,
            "problems": [],
            "warnings": self.preview.warnings,
            "exp": self.legal_config.exp,
            "seq_len": self.legal_config.train.seq_len,
            "world_size": self.world_size,
            "cp_size": self.preview.topology.size,
            "topology": {"nodes": self.preview.topology.nodes, "local_ranks": self.preview.topology.local_ranks},
            "attention": self.preview.to_dict(),
            "candidates": [method.to_dict() for method in self.ranking],
            "memory": None,
            "flops": {
                "model": flops.model,
                "model_full_attention": flops.model_full_attention,
                "hardware": flops.hardware,
            },
            "time": self.preview.time_to_dict(),
        }


def placement_overrides(ranks: int | None, nodes: int | None) -> list[str]:
    """--ranks and --nodes as settings."""
    chosen = {"cluster.ranks_per_node": ranks, "cluster.topology_nodes": nodes}
    return [f"{key}={value}" for key, value in chosen.items() if value is not None]


def names_to_compare(
    compare: str | None, compare_all: bool, overrides: Sequence[str], config_dirs: Sequence[Path]
) -> list[str]:
    """Options of the group attention, as --compare lists them or (--all) all of them; empty without either."""
    if compare is None and not compare_all:
        return []
    options = list(list_options(search_path(config_dirs)).get("attention", {}))
    names = options if compare is None else list(dict.fromkeys(name.strip() for name in compare.split(",")))
    problems = [f"--compare and --all exclude each other; leave out --all or --compare {compare}"] * (
        compare is not None and compare_all
    )
    problems += [f"--compare: no option {name!r} of attention; there are {', '.join(options)}"
                 for name in names if name not in options]  # fmt: skip
    problems += [f"{override}: --compare and --all choose the attention themselves; leave it out"
                 for override in overrides if override.startswith("attention=")]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    return names


def plan_one(overrides: Sequence[str], config_dirs: Sequence[Path], machine: Machine | None) -> Candidate:
    """The plan of the configuration that these overrides spell. Raises ConfigError when it is not legal."""
    config = compose(overrides, config_dirs).config
    topology = group_topology(config)
    choice = settle_auto(config, topology, machine)
    preview = preview_attention(choice.config, topology, machine)
    return Candidate(preview.method.preset, choice.config, preview, ranking=choice.candidates)


def plan_each(
    names: Sequence[str], overrides: Sequence[str], config_dirs: Sequence[Path], machine: Machine | None
) -> list[Candidate]:
    """One candidate per option of attention, in that order.

    Raises ConfigError when none is legal: then the mistake is not in the method.
    """
    candidates = []
    for name in names:
        try:
            planned = plan_one([*overrides, f"attention={name}"], config_dirs, machine)
            candidates.append(replace(planned, name=name))
        except ConfigError as error:
            candidates.append(Candidate(name, problems=error.problems))
    if all(candidate.preview is None for candidate in candidates):
        raise ConfigError(list(dict.fromkeys(text for candidate in candidates for text in candidate.problems)))
    return candidates


def group_topology(config: RunConfig) -> Topology:
    """Where the ranks that share one sequence lie. Raises ConfigError while their number is unknown."""
    cp_size, cluster = known_cp_size(config), config.cluster
    if cp_size is None:
        raise ConfigError(
            "the number of ranks is unknown: cluster.ranks_per_node is null, which means one per GPU of the machine "
            "that trains; add --ranks N (and --nodes M), such as --ranks 16 --nodes 2"
        )
    world_size, nodes = cluster.ranks_per_node or cp_size * _model_copies(config), cluster.topology_nodes or 1
    if world_size % nodes:
        raise ConfigError(f"cluster.topology_nodes: {nodes} nodes cannot share {world_size} ranks evenly; see --nodes")
    return Topology(nodes, world_size // nodes).group(cp_size)


def _model_copies(config: RunConfig) -> int:
    """Ranks of the world for every rank that shares a given sequence."""
    parallel = config.parallel
    return parallel.dp_replicate_size * parallel.dp_shard_size * parallel.tp_size
