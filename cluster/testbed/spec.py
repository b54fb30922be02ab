"""What a testbed shall be: a checked value, and the names that follow from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster.testbed.hardware.devices import NO_HARDWARE, hardware_table
from engine.config.errors import ConfigError

DEFAULT_NAME = "testbed"
MAX_NODES = 64
MAX_RAILS = 8
MANAGEMENT = "eth0"  # the interface that SSH uses; rails are rail0, rail1, ...
_NAME = re.compile(r"[a-z][a-z0-9-]{0,11}")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]?)(bit|b|ib)(?:/s)?")
_UNITS = {"bit": (1000, 1), "b": (1000, 8), "ib": (1024, 8)}  # base of the prefixes, bits


@dataclass(frozen=True)
class TestbedSpec:
    """One testbed. Raises ConfigError, with every mistake, for what cannot be built.

    rate_bits_per_s: of every link, each way; None: as fast as the machine. docker_in_memory: the engines keep their
    images in memory instead of on the disk that all nodes share. hardware: profile of the fake GPUs and InfiniBand.
    slurm: a Slurm controller, and a daemon on every node.
    """

    __test__ = False  # of pytest: not a class of tests

    name: str = DEFAULT_NAME
    nodes: int = 4
    rails: int = 0
    rate_bits_per_s: int | None = None
    docker: bool = False
    docker_in_memory: bool = False
    hardware: str = NO_HARDWARE
    slurm: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not is_testbed_name(self.name):
            problems.append(
                f"testbed name {self.name!r}: expected at most 12 lower-case letters, digits and dashes, a letter first"
            )
        if not 1 <= self.nodes <= MAX_NODES:
            problems.append(f"{self.nodes} nodes: expected 1 to {MAX_NODES}")
        if not 0 <= self.rails <= MAX_RAILS:
            problems.append(f"{self.rails} rails: expected 0 to {MAX_RAILS}")
        models = hardware_table("models")
        if self.hardware not in (NO_HARDWARE, *models):
            problems.append(f"no hardware profile {self.hardware!r}; there are {', '.join(models)} and {NO_HARDWARE}")
        if self.docker_in_memory and not self.docker:
            problems.append("Docker's data in memory, but no Docker: add --docker")
        if problems:
            raise ConfigError(problems)

    @property
    def node_names(self) -> tuple[str, ...]:
        """Host names of the nodes: tb1, tb2, ... of the default testbed, NAME1, NAME2, ... of others."""
        return tuple(f"{self._prefix}{number}" for number in range(1, self.nodes + 1))

    @property
    def node_set(self) -> str:
        """The nodes in NodeSet grammar."""
        return f"{self._prefix}[1-{self.nodes}]" if self.nodes > 1 else self.node_names[0]

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Network interfaces of every node, beside lo."""
        return (MANAGEMENT, *(f"rail{rail}" for rail in range(self.rails)))

    @property
    def _prefix(self) -> str:
        if self.name == DEFAULT_NAME:
            return "tb"
        return self.name if self.name[-1].isalpha() else f"{self.name.rstrip('-')}-"


def is_testbed_name(text: str) -> bool:
    """Whether a testbed may have this name."""
    return _NAME.fullmatch(text) is not None


def parse_rate(text: str) -> int:
    """Bits per second of `200mbit`, `50MB/s` or `50MiB/s`; ConfigError for anything else and for less than 8 kbit/s."""
    found, bits = _RATE.fullmatch(text.strip().lower()), 0
    if found is not None:
        base, unit_bits = _UNITS[found[3]]
        bits = round(float(found[1]) * base ** " kmg".index(found[2] or " ") * unit_bits)
    if not 8_000 <= bits <= 10**12:
        raise ConfigError(f"rate {text!r}: expected one such as 200mbit or 50MB/s, from 8kbit to 1000gbit")
    return bits
