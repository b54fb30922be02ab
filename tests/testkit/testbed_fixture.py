"""A pytest plugin: virtual clusters for tests, real sshd in network namespaces. See `burst testbed --help`.

def test_something(testbed4):                   four plain nodes, shared by all tests: leave them as they were
    with connect(testbed4.host(testbed4.node_names[0])) as connection: ...

def test_faults(make_testbed):                  one of your own, taken down after the test, whatever happens
    testbed = make_testbed(nodes=2, rails=1, rate="100mbit", docker=True, slurm=True)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from cluster.testbed.build import up
from cluster.testbed.machine import required_tools
from cluster.testbed.slurm import slurmd
from cluster.testbed.spec import TestbedSpec, parse_rate
from cluster.testbed.teardown import standing_names, tear_down
from cluster.testbed.testbed import Testbed
from testkit.needs import require

MakeTestbed = Callable[..., Testbed]
_MARK = "zt"  # names of testbeds of tests: zt, the test process, two letters that count
_counter = itertools.count()


class Testbeds:
    """Makes testbeds and takes every one of them down. `config_dir` is what XDG_CONFIG_HOME must be to use them."""

    __test__ = False

    def __init__(self, config_dir: Path) -> None:
        self.config_dir = config_dir
        self._made: dict[str, Path] = {}

    def adopt(self, name: str) -> None:
        """Take down a testbed of this name at the end, whoever builds it."""
        self._made[name] = self.config_file(name)

    def make(self, *, rate: str | None = None, **spec: Any) -> Testbed:
        """A testbed of `TestbedSpec(**spec)`; its name is made up unless it is given."""
        _require(docker=spec.get("docker", False), slurm=spec.get("slurm", False))
        spec.setdefault("name", next_name())
        self.adopt(spec["name"])
        checked = TestbedSpec(rate_bits_per_s=parse_rate(rate) if rate else None, **spec)
        return up(checked, self.config_file(checked.name))

    def config_file(self, name: str) -> Path:
        """Where the testbed `name` puts the file of `cluster=NAME`."""
        return self.config_dir / "burst" / "conf" / "cluster" / f"{name}.yaml"

    def close(self) -> None:
        """Take all down."""
        for name, config_file in self._made.items():
            tear_down(name, config_file)
        self._made.clear()


@pytest.fixture(scope="session")
def testbed_machine() -> None:
    """A machine that can carry testbeds; skips where it cannot. Removes what killed test sessions left."""
    _require()
    remove_abandoned()


def _require(docker: bool = False, slurm: bool = False) -> None:
    """Skip where the machine cannot carry a testbed with these."""
    tools = required_tools(docker=docker, slurm=slurm).values()
    require("root", "namespaces", *itertools.chain.from_iterable(tools))


@pytest.fixture(scope="session")
def testbed4(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Four nodes without Docker, links unshaped; shared, so tests must leave them as they found them."""
    with contextlib.closing(Testbeds(tmp_path_factory.mktemp("testbed4"))) as testbeds:
        yield testbeds.make(nodes=4)


@pytest.fixture
def slurm_testbed(standing_slurm_testbed: Testbed) -> Testbed:
    """Three idle nodes with Slurm; shared. Slurm clears a node only some time after its job has ended."""
    for node in standing_slurm_testbed.nodes:
        slurmd(node).wait()
    return standing_slurm_testbed


@pytest.fixture(scope="session")
def standing_slurm_testbed(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """What `slurm_testbed` gives, whatever the test before left running on it."""
    _require(slurm=True)
    with contextlib.closing(Testbeds(tmp_path_factory.mktemp("slurm_testbed"))) as testbeds:
        yield testbeds.make(nodes=3, slurm=True)


@pytest.fixture
def testbeds(testbed_machine: None, tmp_path: Path) -> Iterator[Testbeds]:
    """Makes testbeds of this test, and knows where their configuration lies."""
    with contextlib.closing(Testbeds(tmp_path / "config")) as made:
        yield made


@pytest.fixture(scope="module")
def module_testbeds(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbeds]:
    """Makes testbeds of this module alone: for those that get faults, or take long to build."""
    with contextlib.closing(Testbeds(tmp_path_factory.mktemp("module") / "config")) as made:
        yield made


@pytest.fixture
def make_testbed(testbeds: Testbeds) -> MakeTestbed:
    """`make_testbed(nodes=2, rails=1, rate="100mbit", docker=True, hardware="h100x8")`: a testbed of this test."""
    return testbeds.make


def next_name(owner: int | None = None) -> str:
    """A name that nothing else uses: neither another test process nor an earlier testbed of this one."""
    tens, ones = divmod(next(_counter), 26)
    return f"{_MARK}{owner or os.getpid()}{ascii_lowercase[tens]}{ascii_lowercase[ones]}"


def remove_abandoned() -> None:
    """Take down the testbeds of test processes that are no more."""
    for name in standing_names():
        if (owner := owner_of(name)) is not None and not Path(f"/proc/{owner}").exists():
            tear_down(name, Path(os.devnull) / name)


def owner_of(name: str) -> int | None:
    """The test process that made the testbed `name`; None when no test did."""
    found = re.fullmatch(rf"{_MARK}(\d+)[a-z]{{2}}", name)
    return int(found[1]) if found else None
