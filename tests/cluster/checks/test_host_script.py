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
from cluster.checks.groups.engine import read_engine
from cluster.checks.groups.host import read_runs, read_system
from cluster.checks.groups.software import Software, read_software
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, SectionState
from engine.config.cluster import ClusterConfig

RUN_ID = "20260105-101010-abcdef"
HOSTILE_IMAGE = "$(touch pwned);`touch pwned`' \" --help *"
CANARY = "kanarienvogel"
STARTED_TICKS = 100000
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


def process(root: Path, pid: int, name: str, *, state: str = "S", environment: bytes = b"") -> None:
    """A process as /proc shows it; a name may hold anything but NUL."""
    rest = f"{state} 1 7 7 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 {STARTED_TICKS} 0 0"
    write(root / f"proc/{pid}/stat", f"{pid} ({name}) {rest}\n")
    write(root / f"proc/{pid}/status", f"Name:\tx\nState:\t{state}\nUid:\t0\t0\t0\t0\n")
    write(root / f"proc/{pid}/environ", environment)


@pytest.fixture(scope="module")
def trapped(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[NodeProbe, Path]:
    """The answer of a node whose /proc, /sys and /etc were made by an enemy, and the folder it was asked in."""
    folder = tmp_path_factory.mktemp("trapped node")
    root = folder / "root"
    write(root / "proc/uptime", "9000.50 100.0\n")
    write(root / "proc/meminfo", "MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    900000 kB\n")
    write(root / "sys/class/infiniband/mlx5_0/node_type", "1\n")
    write(root / "proc/self/limits", "Max locked memory         8388608        8388608        bytes\n")
    process(root, 1, "init")
    process(root, 20, "a) Z 1 (b", state="D")
    process(root, 21, "x\nseen 0\nprocess 1 Z 1 0 1 fake\n", state="D")
    process(root, 22, "$(touch pwned);`touch pwned`\x1b[31m", state="Z")
    marked = f"SECRET={CANARY}\0LINES=a\nBURST_RUN_ID=fake\0BURST_RUN_ID={RUN_ID}\0"
    process(root, 30, "py) R 1\nrun 1 0 1 fake", environment=marked.encode())
    process(root, 32, "other", environment=b"BURST_RUN_IDENTITY=1\0XBURST_RUN_ID=2\0BURST_RUN_ID=\0")
    process(root, 33, "evil", environment=b"BURST_RUN_ID=x\n$(touch pwned) \xff\0")
    environment = {"BURST_PROBE_ROOT": str(root), "PASSWORD": CANARY}
    return ask(tools, folder, **environment), folder


@pytest.fixture(scope="module")
def here(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> NodeProbe:
    """The answer of this machine."""
    return ask(tools, tmp_path_factory.mktemp("here"))


def test_on_this_machine_every_section_ends_and_can_be_read(here: NodeProbe) -> None:
    probe = here
    assert len(probe.sections) == 6
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


def test_the_rehearsal_tree_is_read_where_it_has_the_file(trapped: tuple[NodeProbe, Path]) -> None:
    system = read_system(NodeFacts(trapped[0], BARE))
    assert (system.memory_bytes, system.adapters, system.locked_bytes) == (1000000 << 10, 1, 8388608)
    assert only(trapped[0], "host.memlock").severity is Verdict.FAIL


def test_runs_are_found_by_the_environment_and_by_nothing_that_looks_like_it(trapped: tuple[NodeProbe, Path]) -> None:
    found, _ = read_runs(trapped[0].section("host.runs"))
    assert [one.pid for one in found] == [30, 33]
    assert (found[0].run_id, found[0].owner) == (RUN_ID, "root")


def test_what_is_read_is_not_executed_and_secrets_beside_it_never_leave_the_node(
    trapped: tuple[NodeProbe, Path],
) -> None:
    assert not list(trapped[1].rglob("pwned"))
    assert all(CANARY not in section.output for section in trapped[0].sections.values())


def fake_docker(tools: Path, folder: Path, body: str) -> Path:
    """The tools with a `docker` of our own in front, which first notes its words, one per line."""
    program(folder, "docker", f'printf "%s\\n" "$@" >>"{folder}/words"\n{body}')
    for tool in tools.iterdir():
        (folder / "bin" / tool.name).symlink_to(tool)
    return folder / "bin"


ENGINE = f"""
case "$1 $*" in
    image*) echo '[{json.dumps(HEALTHY["host.image"])}]' ;;
    *) echo '["26.1.3","/","overlay2",{{"nvidia":{{}}}}]'; echo a warning >&2 ;;
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


def test_every_way_in_which_gpus_reach_containers_is_found(tools: Path, tmp_path: Path) -> None:
    with_docker = fake_docker(tools, tmp_path, ENGINE)
    (with_docker / "nvidia-container-runtime-hook").symlink_to("docker")
    for name in ("etc/cdi/nvidia.yaml", "etc/cdi/other.yaml", "var/run/cdi/k8s.device-plugin.nvidia.json"):
        write(tmp_path / "root" / name, "")
    root = str(tmp_path / "root")
    probe = ask(with_docker, tmp_path, "docker", settings=GROUP.settings(DOCKER), BURST_PROBE_ROOT=root)
    assert read_engine(NodeFacts(probe, DOCKER)).ways == (
        *("runtime nvidia", "hook nvidia-container-runtime-hook"),
        *("CDI nvidia.yaml", "CDI k8s.device-plugin.nvidia.json"),
    )


def test_an_engine_without_a_daemon_is_silent_although_it_ends_well(tools: Path, tmp_path: Path) -> None:
    engine = """echo '["",null,"",{}]'; echo Cannot connect to the Docker daemon >&2"""
    probe = ask(fake_docker(tools, tmp_path, engine), tmp_path, "docker", settings=GROUP.settings(DOCKER))
    assert "Cannot connect to the Docker daemon" in only(probe, "host.docker", DOCKER).observed


def test_an_engine_that_is_not_there_is_named(tools: Path, tmp_path: Path) -> None:
    probe = ask(tools, tmp_path, "docker", settings={"BURST_ENGINE": "no-such-engine --flag"})
    assert "not installed" in only(probe, "host.docker", DOCKER).observed
