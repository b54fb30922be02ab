"""Group host on hand-written answers: each threshold from both sides, and what a node lacks or names strangely."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from host_sections import BARE, BARE_SOFTWARE, DOCKER, GROUP, HEALTHY, changed, healthy, room
from testkit.check_fakes import changed_section, ended, told

from cluster.checks.finding import Verdict, worst
from cluster.survey.section import NodeProbe, SectionState
from engine.config.cluster import ClusterConfig, ContainerConfig

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN
GIB, MIB = 1 << 30, 1 << 20
CONF = "/etc/nccl.conf"
NO_IMAGE = ClusterConfig(container=ContainerConfig(runtime="docker"))
DENIED = "permission denied while trying to connect to the Docker daemon socket"
UNNEEDED = "not needed: cluster.container.runtime is bare"


def disk(place: str, room: object) -> NodeProbe:
    return changed("system", rooms={**HEALTHY["host.system"]["rooms"], place: room})


def shm(room: object) -> NodeProbe:
    return changed("system", shm=room)


def said(name: str, output: str, code: int = 1) -> NodeProbe:
    """A healthy node one of whose sections ended with `code`."""
    return replace(healthy(), sections={**healthy().sections, name: ended(name, output, code)})


def python(version: str) -> NodeProbe:
    return healthy(software={**BARE_SOFTWARE, "python": version})


# An answer, the check that it decides, the verdict and the words it begins with.
CASES: list[tuple[NodeProbe, str, Verdict, str]] = [
    *((disk("/", room(free * GIB)), "disk", level, "") for free, level in ((0, FAIL), (1, WARN), (9, WARN), (10, OK))),
    *(
        (disk("/tmp", room(free * GIB)), "disk", level, "")
        for free, level in ((0, FAIL), (1, WARN), (4, WARN), (5, OK))
    ),
    *((disk("/", room(inodes=free, of=1000)), "disk", level, "") for free, level in ((9, FAIL), (10, OK))),
    (disk("/", room(inodes=0, of=0, kind="btrfs")), "disk", OK, ""),
    (disk("/", {**room(), "size": 0}), "disk", UNKNOWN, ""),
    *((shm(room(free * MIB, kind="tmpfs")), "shm", level, "") for free, level in ((64, FAIL), (65, WARN), (1024, OK))),
    (shm(room(kind="overlay")), "shm", WARN, "on a disk (overlay), not in memory"),
    (shm(None), "shm", FAIL, "not there"),
    *(
        (changed("docker", room=room(free * GIB)), "docker_disk", level, f"{free}.0 GiB free of 1752.0 GiB (ext4)")
        for free, level in ((4, FAIL), (5, WARN), (39, WARN), (40, OK))
    ),
    (changed("docker", room=None), "docker_disk", UNKNOWN, "it could not be asked"),
    *(
        (changed("shared", room=room(free * GIB)), "shared", level, "")
        for free, level in ((0, FAIL), (1, WARN), (49, WARN), (50, OK))
    ),
    (changed("shared", room=None, trouble="Stale file handle"), "shared", FAIL, "the folder is not there: Stale file"),
    (said("host.shared", "", 127), "shared", UNKNOWN, "host.shared: exit code 127"),
    (
        changed_section(healthy(), "host.shared", exit_code=None, state=SectionState.TIMED_OUT),
        *("shared", FAIL, "it does not answer"),  # the file server hangs
    ),
    (changed("system", files=[1000, 1023]), "nofile", FAIL, "1000 open files, at most 1023"),
    (changed("system", files=[1024, 1024]), "nofile", WARN, ""),
    (changed("system", files=[8191, 1048576]), "nofile", WARN, ""),
    (changed("system", files=[8192, 8192]), "nofile", OK, ""),
    (changed("system", files=["unlimited", "unlimited"]), "nofile", OK, "inf open files"),
    (changed("system", files=["lots", 1]), "nofile", UNKNOWN, ""),
    (changed("system", locked="65536"), "memlock", OK, "0 MiB for a session; containers get their own"),
    (changed("system", locked=None), "memlock", UNKNOWN, ""),
    (changed("system", memory=[0, 0]), "memory_free", UNKNOWN, ""),
    *(
        (changed("system", memory=[1000, left]), "memory_free", level, f"0 MiB ({left / 1000:.0%}) available of 0 MiB")
        for left, level in ((49, FAIL), (50, WARN), (199, WARN), (200, OK))
    ),
    (healthy(), "docker", OK, "26.1.3, images in /var/lib/docker (overlay2)"),
    (said("host.docker", "not installed"), "docker", FAIL, "docker: not installed"),
    (said("host.docker", "", 127), "docker", UNKNOWN, "no container engine answers (host.docker: exit code 127)"),
    (said("host.docker", DENIED), "docker", FAIL, f"docker: {DENIED}"),
    (said("host.docker", "{}", 0), "docker", UNKNOWN, "no container engine answers"),
    *(
        (said("host.docker", DENIED), check, UNKNOWN, "no container engine answers (host.docker: exit code 1)")
        for check in ("docker_disk", "docker_gpu", "image")
    ),
    (healthy(), "docker_gpu", OK, "nvidia"),
    (changed("docker", ways=[]), "docker_gpu", FAIL, "no runtime, hook or device list of NVIDIA"),
    (changed("docker", ways=[], has_gpus=False), "docker_gpu", SKIP, "the NVIDIA driver is not loaded"),
    (healthy(), "nccl_conf", OK, "none"),
    (changed("live", files={CONF: {"NCCL_P2P_DISABLE": "1"}}), "nccl_conf", WARN, f"NCCL_P2P_DISABLE=1 ({CONF})"),
    (changed("live", login={"NCCL_DEBUG": "TRACE"}), "nccl_conf", WARN, "NCCL_DEBUG=TRACE (login)"),
    (changed("live", login={"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "WARN"}), "nccl_conf", OK, "none"),
    (changed("live", ranks=[["7", "run", "3", {"NCCL_P2P_DISABLE": "1"}]]), "nccl_conf", OK, "none"),
    (healthy(live={"login": {}}), "nccl_conf", UNKNOWN, ""),
    (said("env_live", "PermissionError: [Errno 13] Permission denied: '/etc/nccl.conf'"), "nccl_conf", UNKNOWN, ""),
    (healthy(), "image", OK, "burst:cuda: "),
    (
        said("host.image", "Error response from daemon: No such image: burst:cuda"),
        "image",
        WARN,
        "burst:cuda is not on",
    ),
    (said("host.image", "Cannot connect to the Docker daemon"), "image", UNKNOWN, ""),
    *(
        (healthy(image=told), "image", UNKNOWN, "")
        for told in ({**HEALTHY["host.image"], "RootFS": {}}, ["amd64", 1], {})
    ),
    # In containers Python supervises ranks, which have that of the image.
    *((python(version), "python", level, "") for version, level in (("3.9.0", OK), ("3.8.20", FAIL))),
    (healthy(software=None), "python", FAIL, "cannot run python3"),
]
BARE_CASES: list[tuple[NodeProbe, str, Verdict, str]] = [
    (changed("system", locked="65536"), "memlock", FAIL, "0 MiB for a session, and 2 RDMA adapters must lock"),
    (changed("system", locked="65536", adapters=0), "memlock", OK, "0 MiB for a session; no RDMA adapter needs it"),
    *(
        (python(version), "python", level, "3.1" if level is OK else f"/usr/bin/python3 is Python {version}")
        for version, level in (("3.12.1", OK), ("3.11.0", OK), ("3.10.14", WARN), ("3.9.0", WARN), ("3.8.20", FAIL))
    ),
    (healthy(software=None), "python", FAIL, "cannot run python3"),
    (
        healthy(software={**BARE_SOFTWARE, "modules": {"torch": None, "numpy": "", "yaml": None}}),
        *("python", WARN, "/usr/bin/python3 has no torch, yaml"),
    ),
    *((healthy(software={**BARE_SOFTWARE, "executable": path}), "python", UNKNOWN, "") for path in ("", "/a/../b")),
    *(
        (said("host.docker", DENIED), check, SKIP, f"no container engine answers; {UNNEEDED}")
        for check in ("docker", "docker_disk", "docker_gpu")
    ),
    (changed("docker", room=room(0)), "docker_disk", OK, f"0 MiB free; {UNNEEDED}"),
    (changed("docker", ways=[]), "docker_gpu", OK, UNNEEDED),
    (healthy(), "shared", SKIP, "cluster.shared_folder is not set"),
    (healthy(), "image", SKIP, "cluster.container.image is not set"),
]


@pytest.mark.parametrize(
    ("config", "probe", "name", "expected", "words"),
    [
        *((DOCKER, *case) for case in CASES),
        *((BARE, *case) for case in BARE_CASES),
        (replace(BARE, container=ContainerConfig(image="a:b")), healthy(), "image", SKIP, UNNEEDED),
        (NO_IMAGE, healthy(), "image", SKIP, "cluster.container.image is not set"),
    ],
)
def test_one_answer_decides(config: ClusterConfig, probe: NodeProbe, name: str, expected: Verdict, words: str) -> None:
    found = [finding for finding in GROUP.check(probe, config) if finding.check == f"host.{name}"]
    assert worst(finding.severity for finding in found) is expected
    assert any(finding.observed.startswith(words) for finding in found)
    assert all(finding.remedy for finding in found if not finding.severity.is_fine)


def test_a_healthy_node_has_an_answer_to_every_check_and_all_are_ok() -> None:
    found = GROUP.check(healthy(), DOCKER)
    assert {finding.check for finding in found} == set(GROUP.checks)
    assert {finding.severity for finding in found} == {OK}


def test_a_node_that_answered_nothing_has_every_check_and_none_is_ok() -> None:
    found = GROUP.check(NodeProbe("node1"), DOCKER)
    assert {finding.check: finding.severity for finding in found} == dict.fromkeys(GROUP.checks, UNKNOWN)


def of_memory(*totals: int | None) -> list[NodeProbe]:
    answers = [{**HEALTHY["host.system"], "memory": [(total or 0) * GIB, 0]} for total in totals]
    return [healthy(f"n{at}", system=answer) for at, answer in enumerate(answers)]


def with_room(*nodes: tuple[int, bool]) -> list[NodeProbe]:
    """Nodes with so many GiB free that hold the image, of 18 GiB, or do not."""
    held = [healthy(f"n{at}", docker={**HEALTHY["host.docker"], "room": room(free * GIB)})
            for at, (free, _) in enumerate(nodes)]  # fmt: skip
    lacks = {"output": "Error: No such image: burst:cuda", "exit_code": 1}
    return [one if has else changed_section(one, "host.image", **lacks)
            for one, (_, has) in zip(held, nodes, strict=True)]  # fmt: skip


MEMORY = "WARN host.memory: {}.0 GiB; expected: 1000.0 GiB, as other nodes have"
FULL = "FAIL host.docker_disk (/var/lib/docker): 35.0 GiB free; expected: 36.0 GiB for burst:cuda"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (of_memory(1000, 1000, 1000, 970), []),
        *((of_memory(1000, 1000, 1000, odd), [MEMORY.format(odd)]) for odd in (969, 1031)),
        (of_memory(1000, 1000, None), ["UNKNOWN host.memory: the node did not tell how much memory it has"]),
        (with_room((5, True), (36, False)), []),
        (with_room((5, True), (35, False)), [FULL]),
        (with_room((0, False), (0, False)), []),  # nobody knows its size
    ],
)
def test_nodes_are_compared(nodes: list[NodeProbe], expected: list[str]) -> None:
    assert told(GROUP.compare(nodes, DOCKER)) == expected
    assert {one.check for one in GROUP.compare(nodes, BARE)} == {"host.memory"}


def test_traits_leave_out_what_the_image_brings() -> None:
    versions = GROUP.traits(healthy(), DOCKER)["host.versions"]
    assert re.fullmatch("image [0-9a-f]{12}", versions)
    bare = GROUP.traits(healthy(software=BARE_SOFTWARE), BARE)
    assert bare["host.versions"] == "Python 3.11, torch 2.9.1+cu128, NCCL 2.27.5"


def test_the_probe_is_told_what_it_must_know() -> None:
    assert GROUP.settings(DOCKER) == {
        "BURST_ENGINE": "docker",
        "BURST_IMAGE": "burst:cuda",
        "BURST_SHARED_FOLDER": "/mnt/shared",
    }
    assert "BURST_IMAGE" not in GROUP.settings(BARE)
    assert "BURST_PYTHON" not in GROUP.settings(replace(DOCKER, python="/opt/python"))
    assert GROUP.settings(replace(BARE, python="/opt/python"))["BURST_PYTHON"] == "/opt/python"
