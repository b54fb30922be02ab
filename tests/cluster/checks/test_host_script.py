"""The questions of group host, run by dash and with the tools of busybox, here and on a tree full of traps."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from host_sections import BARE, DOCKER, GROUP, HEALTHY
from rehearsal import program
from testkit.check_fakes import ask_here, installed

from cluster.checks.finding import Finding, Verdict
from cluster.checks.groups.host import read_system
from cluster.checks.groups.software import Software, read_software
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, SectionState
from engine.config.cluster import ClusterConfig

HOSTILE_IMAGE = "$(touch pwned);`touch pwned`' \" --help *"
SHELLS = ("dash", "busybox")


@pytest.fixture(scope="module", params=SHELLS)
def tools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that goes first in PATH: `sh` and, for busybox, all of its tools."""
    folder = tmp_path_factory.mktemp("tools")
    if request.param == "dash":
        (folder / "sh").symlink_to(installed("dash"))
    else:
        subprocess.run([installed("busybox"), "--install", "-s", str(folder)], check=True)
    return folder


def ask(
    tools: Path, folder: Path, *sections: str, settings: Mapping[str, str] = MappingProxyType({}), **environment: str
) -> NodeProbe:
    """The answer to these questions (none: to all) when the shell and the first tools are those in `tools`."""
    questions = [one for one in GROUP.questions if not sections or one.name.removeprefix("host.") in sections]
    return ask_here(questions, folder, tools=tools, settings=settings, **environment)


def only(probe: NodeProbe, check: str, config: ClusterConfig = BARE) -> Finding:
    (finding,) = [one for one in GROUP.check(probe, config) if one.check == check]
    return finding


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def here(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> NodeProbe:
    """The answer of this machine."""
    return ask(tools, tmp_path_factory.mktemp("here"))


def test_on_this_machine_every_section_ends_and_can_be_read(here: NodeProbe) -> None:
    probe = here
    assert len(probe.sections) == 5
    assert {section.state for section in probe.sections.values()} == {SectionState.ENDED}
    unknown = [one for one in GROUP.check(probe, BARE) if one.severity is Verdict.UNKNOWN]
    assert not unknown
    system = read_system(NodeFacts(probe, BARE))
    assert system.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert system.files[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert system.locked_bytes == (math.inf if locked == resource.RLIM_INFINITY else locked)


def test_python_that_is_asked_is_that_of_the_ranks(tools: Path, tmp_path: Path) -> None:
    told = '{"python": "3.12.1", "executable": "/my/python", "modules": {"torch": "9.9.9"}, "nccl": null}'
    (tmp_path / "my venv").mkdir()
    program(tmp_path / "my venv", "python", f"echo '{told}'")
    settings = GROUP.settings(replace(BARE, python="~/my venv/bin/python"))
    software = read_software(NodeFacts(ask(tools, tmp_path, "software", settings=settings), BARE))
    assert software == Software("/my/python", (3, 12, 1), {"torch": "9.9.9"}, None)


def test_the_rehearsal_tree_is_read_where_it_has_the_file(tools: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root / "proc/meminfo", "MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    900000 kB\n")
    write(root / "sys/class/infiniband/mlx5_0/node_type", "1\n")
    write(root / "proc/self/limits", "Max locked memory         8388608        8388608        bytes\n")
    probe = ask(tools, tmp_path, "system", BURST_PROBE_ROOT=str(root))
    system = read_system(NodeFacts(probe, BARE))
    assert (system.memory_bytes, system.adapters, system.locked_bytes) == (1000000 << 10, 1, 8388608)
    assert only(probe, "host.memlock").severity is Verdict.FAIL


def fake_docker(tools: Path, folder: Path, body: str) -> Path:
    """The tools with a `docker` of our own in front, which first notes its words, one per line."""
    program(folder, "docker", f'printf "%s\\n" "$@" >>"{folder}/words"\n{body}')
    for tool in tools.iterdir():
        (folder / "bin" / tool.name).symlink_to(tool)
    return folder / "bin"


ENGINE = f"""
case "$1 $*" in
    image*) echo '[{json.dumps(HEALTHY["host.image"])}]' ;;
    *) echo '["26.1.3","/","overlay2"]'; echo a warning >&2 ;;
esac
"""


def test_settings_reach_the_engine_as_they_are(tools: Path, tmp_path: Path) -> None:
    settings = {
        **GROUP.settings(DOCKER),
        "BURST_IMAGE": HOSTILE_IMAGE,
        "BURST_SHARED_FOLDER": f"{tmp_path}/$(touch pwned)",
    }
    probe = ask(fake_docker(tools, tmp_path, ENGINE), tmp_path, "docker", "image", "shared", settings=settings)
    assert only(probe, "host.image", DOCKER).severity is Verdict.OK
    assert only(probe, "host.docker", DOCKER).severity is Verdict.OK
    assert only(probe, "host.shared", DOCKER).severity is Verdict.FAIL
    assert HOSTILE_IMAGE in (tmp_path / "words").read_text().splitlines()
    assert not list(tmp_path.rglob("pwned"))


def test_an_engine_without_a_daemon_is_silent_although_it_ends_well(tools: Path, tmp_path: Path) -> None:
    engine = """echo '["",null,""]'; echo Cannot connect to the Docker daemon >&2"""
    probe = ask(fake_docker(tools, tmp_path, engine), tmp_path, "docker", settings=GROUP.settings(DOCKER))
    assert "Cannot connect to the Docker daemon" in only(probe, "host.docker", DOCKER).observed


def test_an_engine_that_is_not_there_is_named(tools: Path, tmp_path: Path) -> None:
    probe = ask(tools, tmp_path, "docker", settings={"BURST_ENGINE": "no-such-engine --flag"})
    assert "not installed" in only(probe, "host.docker", DOCKER).observed
