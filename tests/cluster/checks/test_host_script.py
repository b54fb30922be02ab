"""The questions of group host, asked of this machine, a tree and engines of our own by real shells."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from host_sections import BARE, DOCKER, GROUP, HEALTHY
from rehearsal import program
from testkit.check_fakes import ask_here, only

from cluster.checks.finding import Verdict
from cluster.checks.groups.engine import read_engine
from cluster.checks.groups.host import read_system
from cluster.checks.groups.software import Software, read_software
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe

HOSTILE_IMAGE = "$(touch pwned);`touch pwned`' \" --help *"
SETTINGS = GROUP.settings(DOCKER)


def ask(
    folder: Path,
    *sections: str,
    settings: Mapping[str, str] = MappingProxyType({}),
    shell: tuple[str, ...] = ("sh",),
    **environment: str,
) -> NodeProbe:
    """The answer to these questions (none: to all); programs in the `bin` of the folder come first."""
    questions = [one for one in GROUP.questions if not sections or one.name.removeprefix("host.") in sections]
    return ask_here(questions, folder, tools=folder / "bin", settings=settings, shell=shell, **environment)


@pytest.mark.parametrize("shell", [("dash",), ("busybox", "sh")])
def test_on_this_machine_every_section_can_be_read(tmp_path: Path, shell: tuple[str, ...]) -> None:
    probe = ask(tmp_path, shell=shell)
    assert len(probe.sections) == 6
    assert not [one for one in GROUP.check(probe, BARE) if one.severity is Verdict.UNKNOWN]
    system = read_system(NodeFacts(probe, BARE))
    assert system.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert system.files[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert system.locked_bytes == (math.inf if locked == resource.RLIM_INFINITY else locked)
    assert system.rooms["/"].size_bytes == os.statvfs("/").f_blocks * os.statvfs("/").f_frsize


def test_python_that_is_asked_is_that_of_the_ranks(tmp_path: Path) -> None:
    told = '{"python": "3.12.1", "executable": "/my/python", "modules": {"torch": "9.9.9"}, "nccl": null}'
    (tmp_path / "my venv").mkdir()
    program(tmp_path / "my venv", "python", f"echo '{told}'")
    settings = GROUP.settings(replace(BARE, python="~/my venv/bin/python"))
    software = read_software(NodeFacts(ask(tmp_path, "software", settings=settings), BARE))
    assert software == Software("/my/python", (3, 12, 1), {"torch": "9.9.9"}, None)


def test_the_rehearsal_tree_is_read_where_it_has_the_file(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    900000 kB\n")
    (root / "proc/self/limits").write_text("Max locked memory         8388608        8388608        bytes\n")
    probe = ask(tmp_path, "system", BURST_PROBE_ROOT=str(root))
    system = read_system(NodeFacts(probe, BARE))
    assert (system.memory_bytes, system.adapters, system.locked_bytes) == (1000000 << 10, 1, 8388608)


WORKS = f"""printf "%s\\n" "$@" >>words
case "$1 $*" in
    image*) echo '[{json.dumps(HEALTHY["host.image"])}]' ;;
    *) echo '["26.1.3","/","overlay2",{{"nvidia":{{}},"runc":{{}}}}]'; echo a warning >&2 ;;
esac
"""
NO_DAEMON = """echo '["",null,"",null]'; echo Cannot connect to the Docker daemon >&2"""


def test_settings_reach_the_engine_as_they_are(tmp_path: Path) -> None:
    program(tmp_path, "docker", WORKS)
    hostile = {"BURST_IMAGE": HOSTILE_IMAGE, "BURST_SHARED_FOLDER": f"{tmp_path}/$(touch pwned)"}
    found = GROUP.check(ask(tmp_path, "docker", "image", "shared", settings=SETTINGS | hostile), DOCKER)
    told = [only(found, f"host.{name}").severity for name in ("docker", "image", "shared")]
    assert told == [Verdict.OK, Verdict.OK, Verdict.FAIL]
    assert HOSTILE_IMAGE in (tmp_path / "words").read_text().splitlines()
    assert not list(tmp_path.rglob("pwned"))


def test_every_way_in_which_gpus_reach_containers_is_found(tmp_path: Path) -> None:
    program(tmp_path, "docker", WORKS)
    program(tmp_path, "nvidia-container-runtime-hook", "")
    for name in ("etc/cdi/nvidia.yaml", "etc/cdi/other.yaml", "var/run/cdi/nvidia.json"):
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    probe = ask(tmp_path, "docker", settings=SETTINGS, BURST_PROBE_ROOT=str(tmp_path / "root"))
    ways = ("nvidia", "nvidia-container-runtime-hook", "CDI nvidia.yaml", "CDI nvidia.json")
    assert read_engine(NodeFacts(probe, DOCKER)).ways == ways


@pytest.mark.parametrize(
    ("engine", "words"), [("docker", "Cannot connect to the Docker daemon"), ("no-such-engine --flag", "not installed")]
)
def test_an_engine_that_does_not_answer_fails_in_its_own_words(tmp_path: Path, engine: str, words: str) -> None:
    program(tmp_path, "docker", NO_DAEMON)  # and ends well
    found = GROUP.check(ask(tmp_path, "docker", settings={"BURST_ENGINE": engine}), DOCKER)
    assert (only(found, "host.docker").severity, words in only(found, "host.docker").observed) == (Verdict.FAIL, True)
