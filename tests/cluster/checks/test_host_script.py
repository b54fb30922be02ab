"""What groups `host` and `net` ask, answered by this machine, a tree and engines of our own in real shells."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from testkit import write_program
from testkit.check_fakes import ask_here, only
from testkit.fake_plan import run_config
from testkit.image_rig import launcher_engine, tar_of
from whole_node import BY_HAND, CLUSTERS, check, groups, in_groups

from cluster.checks.check import Verdict
from cluster.checks.groups.engine import read_engine, read_image
from cluster.checks.groups.host import Software, read_software, read_system
from cluster.image.engine import engine_here
from cluster.survey.facts import NodeFacts
from engine.config.cluster import ClusterConfig

HOSTILE_IMAGE = "$(touch pwned);`touch pwned`' \" --help *"
BARE, DOCKER = (run_config(cluster=CLUSTERS[name]).cluster for name in ("bare", "docker"))
SHELLS = [("dash",), ("busybox", "sh")]


def settings(config: ClusterConfig) -> dict[str, str]:
    return {name: value for group in groups("host") for name, value in group.settings(config).items() if value}


def ask(
    folder: Path, *sections: str, config: ClusterConfig = DOCKER, shell: tuple[str, ...] = ("sh",), **environment: str
) -> NodeFacts:
    """The answer to these questions (none: to all); programs in the `bin` of the folder come first."""
    asked = [one for group in groups("host", "net") for one in group.questions]
    questions = [one for one in asked if not sections or one.name.rpartition(".")[2] in sections]
    given = settings(config)
    answer = ask_here(questions, folder, tools=folder / "bin", settings=given, shell=shell, **environment)
    return NodeFacts(answer, config)


def verdicts(facts: NodeFacts, *names: str) -> list[Verdict]:
    found = check(facts.probe, facts.config)
    return [only(found, f"host.{name}").severity for name in names]


@pytest.mark.needs("ip")
@pytest.mark.parametrize("shell", SHELLS)
def test_on_this_machine_every_section_can_be_read(tmp_path: Path, shell: tuple[str, ...]) -> None:
    facts = ask(tmp_path, shell=shell, config=BARE)
    assert len(facts.probe.sections) == 8
    assert not [one for one in in_groups(check(facts.probe, BARE), "host") if one.severity is Verdict.UNKNOWN]
    system = read_system(facts)
    assert system.memory[0] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert system.files[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert system.locked == (-1 if locked == resource.RLIM_INFINITY else locked)
    assert system.root.size == os.statvfs("/").f_blocks * os.statvfs("/").f_frsize
    shown = json.loads(subprocess.run(["ip", "-json", "-4", "addr"], capture_output=True, check=True).stdout)
    told = {row["ifname"]: [f"{one['local']}/{one['prefixlen']}" for one in row["addr_info"]] for row in shown}
    found, chosen = {one.name: one for one in facts.network.interfaces}, facts.interface.interface
    assert chosen is not None
    for name in ("lo", chosen.name):
        assert found[name].addresses == (told[name][0],)


def test_gateways_are_those_of_every_table_and_a_missing_python_is_told(tmp_path: Path) -> None:
    plain = ask(tmp_path, "links").network.gateways
    write_program(
        tmp_path / "bin/ip", "echo default via 10.1.0.254 dev eth1 table 101; echo local 10.2.0.1 dev eth2 table local"
    )
    assert ask(tmp_path, "links").network.gateways == plain | {"eth1"}
    write_program(tmp_path / "bin/python3", "exit 127")
    assert ask(tmp_path, "links").probe.section("net.links").tool_missing


def test_python_that_is_asked_is_that_of_the_ranks(tmp_path: Path) -> None:
    told = '{"python": "3.12.1", "executable": "/my/python", "modules": {"torch": "9.9.9"}, "nccl": null}'
    write_program(tmp_path / "my venv/bin/python", f"echo '{told}'")
    software = read_software(ask(tmp_path, "software", config=replace(BARE, python="~/my venv/bin/python")))
    assert software == Software("3.12.1", "/my/python", {"torch": "9.9.9"}, None)
    assert "BURST_PYTHON" not in settings(replace(DOCKER, python="/opt/python"))  # an image has its own


def test_the_rehearsal_tree_is_read_where_it_has_the_file(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:    900000 kB\n")
    (root / "proc/self/limits").write_text("Max locked memory         8388608        8388608        bytes\n")
    system = read_system(ask(tmp_path, "system", BURST_PROBE_ROOT=str(root)))
    assert (system.memory[0], system.adapters, system.locked) == (1000000 << 10, 1, 8388608)


WORKS = f"""printf "%s\\n" "$@" >>words
case "$1 $*" in
    image*) echo '[{json.dumps(BY_HAND["host.image"])}]' ;;
    *) echo '["26.1.3","/","overlay2",{{"nvidia":{{}},"runc":{{}}}}]'; echo a warning >&2 ;;
esac
"""


def test_settings_reach_the_engine_as_they_are_and_every_way_of_gpus_is_found(tmp_path: Path) -> None:
    write_program(tmp_path / "bin/docker", WORKS)
    write_program(tmp_path / "bin/nvidia-container-runtime-hook", "")
    for name in ("etc/cdi/nvidia.yaml", "etc/cdi/other.yaml", "var/run/cdi/nvidia.json"):
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    container = replace(DOCKER.container, image=HOSTILE_IMAGE)
    hostile = replace(DOCKER, container=container, shared_folder=f"{tmp_path}/$(touch pwned)")
    facts = ask(tmp_path, "docker", "image", "shared", config=hostile, BURST_PROBE_ROOT=str(tmp_path / "root"))
    assert verdicts(facts, "docker", "image", "shared") == [Verdict.OK, Verdict.OK, Verdict.FAIL]
    assert HOSTILE_IMAGE in (tmp_path / "words").read_text().splitlines()
    assert not list(tmp_path.rglob("pwned"))
    ways = ("nvidia", "nvidia-container-runtime-hook", "CDI nvidia.yaml", "CDI nvidia.json")
    assert read_engine(facts).ways == ways


@pytest.mark.parametrize(
    ("engine", "words"), [("docker", "Cannot connect to the Docker daemon"), ("no-such-engine --flag", "not installed")]
)
def test_an_engine_that_does_not_answer_fails_in_its_own_words(tmp_path: Path, engine: str, words: str) -> None:
    write_program(
        tmp_path / "bin/docker", """echo '["",null,"",null]'; echo Cannot connect to the Docker daemon >&2"""
    )  # well
    facts = ask(tmp_path, "docker", config=replace(DOCKER, container=replace(DOCKER.container, command=engine)))
    found = only(check(facts.probe, DOCKER), "host.docker")
    assert (found.severity, words in found.observed) == (Verdict.FAIL, True)


def test_engine_and_image_of_a_real_daemon(tmp_path: Path) -> None:
    with launcher_engine() as engine:
        config = replace(DOCKER, container=replace(DOCKER.container, command=f"docker -H {engine.host}"))
        facts = ask(tmp_path, "docker", "image", config=config)
        assert read_engine(facts).version == engine("version", "-f", "{{.Server.Version}}")
        assert read_engine(facts).room is not None
        assert verdicts(facts, "docker", "image") == [Verdict.OK, Verdict.WARN]
        engine("import", "-", "burst:cuda", stdin=tar_of({"file": b"x" * 100_000}))
        facts = ask(tmp_path, "docker", "image", config=config)
        pushed = engine_here(("docker", "-H", engine.host)).find("burst:cuda")
        assert (read_image(facts), verdicts(facts, "docker", "image")) == (pushed, [Verdict.OK] * 2)
    lost = ask(tmp_path, "docker", "image", config=config)
    assert verdicts(lost, "docker", "image") == [Verdict.FAIL, Verdict.UNKNOWN]


@pytest.mark.parametrize("settings", ["", "NCCL_P2P_DISABLE=1\n"], ids=["without", "with"])
def test_nccl_conf_inside_an_image_is_read_from_a_real_daemon(tmp_path: Path, settings: str) -> None:
    with launcher_engine() as engine:
        config = replace(DOCKER, container=replace(DOCKER.container, command=f"docker -H {engine.host}"))
        files = {"file": b"x"} | ({"etc/nccl.conf": settings.encode()} if settings else {})
        engine("import", "-", "burst:cuda", stdin=tar_of(files))
        facts = ask(tmp_path, "image", "image_files", config=config)
        assert verdicts(facts, "image_nccl") == [Verdict.WARN if settings else Verdict.OK]
        assert engine("ps", "-aq") == "", "the container that was looked into is left behind"
