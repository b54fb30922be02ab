"""The groups of checks, by name; each is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from cluster.checks.finding import CheckGroup, Finding
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig

GROUP_NAMES = ("gpu", "ib", "net", "host")


@dataclass(frozen=True)
class LoadedGroup:
    """A group and what its module may have beside it.

    probe_settings: variables that its probe script reads. check_fleet: findings that rest on several nodes, by name of
    the node.
    """

    group: CheckGroup
    probe_settings: Callable[[ClusterConfig], Mapping[str, str]] = lambda config: {}
    check_fleet: Callable[[Mapping[str, NodeProbe], ClusterConfig], list[Finding]] = lambda probes, config: []

    @property
    def name(self) -> str:
        """Of the group."""
        return self.group.name


def load_groups(names: Sequence[str] = GROUP_NAMES) -> tuple[LoadedGroup, ...]:
    """The groups of these names, in the order of GROUP_NAMES; `cluster/checks/NAME.py` exports each as GROUP."""
    wanted = (name for name in GROUP_NAMES if name in frozenset(names))
    return tuple(_load(importlib.import_module(f"cluster.checks.{name}")) for name in wanted)


def _load(module: ModuleType) -> LoadedGroup:
    hooks = {name: getattr(module, name) for name in ("probe_settings", "check_fleet") if hasattr(module, name)}
    return LoadedGroup(module.GROUP, **hooks)
