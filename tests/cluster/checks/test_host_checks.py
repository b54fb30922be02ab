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
NO_IMAGE = ClusterConfig(container=ContainerConfig(runtime="docker"))
DENIED = "permission denied while trying to connect to the Docker daemon socket"
UNNEEDED = "not needed: cluster.container.runtime is bare"
RUNS = [
    [77, "ada", 3600.0, "python3", "20260105-101010-abcdef", "node1"],
    [78, "ada", 3600.0, "pt_main_thread", "20260105-101010-abcdef", "node1"],
]
NCCL_CONF = "/etc/nccl.conf"


def disk(place: str, room: object) -> NodeProbe:
    return changed("disk", **{place: room})


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
    *(
        (disk("/", room(inodes=free, of=1000)), "inodes", level, "")
        for free, level in ((9, FAIL), (10, WARN), (49, WARN), (50, OK))
    ),
    (disk("/", room(inodes=0, of=0, kind="btrfs")), "inodes", OK, "made as needed (btrfs)"),
    *(
        (
            disk("shm", room(free * MIB, kind="tmpfs")),
            "shm",
            level,
            f"{free} MiB free of 1752.0 GiB" if level is not OK else "1.0 GiB",
        )
        for free, level in ((64, FAIL), (65, WARN), (1023, WARN), (1024, OK))
    ),
    (disk("shm", room(kind="overlay")), "shm", WARN, "on a disk (overlay), not in memory"),
    (disk("shm", None), "shm", FAIL, "not there"),
    (disk("shm", {**room(), "size": 0}), "shm", UNKNOWN, ""),
    *(
        (changed("docker", room=room(free * GIB)), "docker_disk", level, f"{free}.0 GiB free of 1752.0 GiB (ext4)")
        for free, level in ((4, FAIL), (5, WARN), (39, WARN), (40, OK))
    ),
    (changed("docker", room=None), "docker_disk", UNKNOWN, "its file system could not be asked"),
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
    (changed("system", locked="65536"), "memlock", OK, "0 MiB for a session; containers get a limit of their own"),
    (changed("system", locked=None), "memlock", UNKNOWN, ""),
    (changed("system", memory=[0, 0]), "memory_free", UNKNOWN, ""),
    *(
        (changed("system", memory=[1000, left]), "memory_free", level, f"0 MiB ({left / 1000:.0%}) available of 0 MiB")
        for left, level in ((49, FAIL), (50, WARN), (199, WARN), (200, OK))
    ),
    (healthy(), "runs", OK, "none"),
    (changed("runs", read=12, unread=3444), "runs", OK, "none, but 3444 processes may not be looked into"),
    (changed("runs", read=0, unread=9), "runs", OK, "none, but 9 processes"),
    (changed("runs", read=0), "runs", UNKNOWN, ""),  # no process at all is no proof of none
    (changed("runs", runs=[[77, "ada", 64.0, "python3"]]), "runs", UNKNOWN, ""),
    (changed("runs", runs=RUNS), "runs", FAIL, "2 processes of ada: 77 python3 (60 min), 78 pt_main_thread (60 min)"),
    (
        changed("runs", runs=[[99, "uid 1001", 100.0, " ", "x", "another"]]),
        "runs",
        WARN,
        "1 process of uid 1001: 99 (no name) (100 s)",
    ),
    (
        changed("runs", runs=[[pid, "a", 9.0 - pid, "b", "x", ""] for pid in range(7)]),
        "runs",
        WARN,
        "7 processes of a: 0 b (9 s), 1 b (8 s), 2 b (7 s), 3 b (6 s), 4 b (5 s) and 2 more",
    ),
    (
        changed("live", files={NCCL_CONF: {"NCCL_P2P_DISABLE": "1"}}),
        "nccl_conf",
        WARN,
        "NCCL_P2P_DISABLE=1 (/etc",
    ),
    (changed("live", files={"~/.nccl.conf": {"NCCL_DEBUG": "TRACE"}}), "nccl_conf", WARN, ""),
    (changed("live", login={"NCCL_P2P_DISABLE": "0"}), "nccl_conf", OK, "NCCL_P2P_DISABLE=0 (login)"),
    (
        changed("live", login={"NCCL_SOCKET_IFNAME": "=bond0"}, files={NCCL_CONF: {"NCCL_DEBUG": "WARN"}}),
        *("nccl_conf", OK, "NCCL_SOCKET_IFNAME==bond0 (login), NCCL_DEBUG=WARN (/etc/nccl.conf)"),
    ),
    (
        changed("live", login={"NCCL_VERSION": "2"}, ranks=[["7", "run", "3", {"NCCL_P2P_DISABLE": "1"}]]),
        *("nccl_conf", OK, "no NCCL_* is set"),
    ),
    (healthy(live={"login": {}}), "nccl_conf", UNKNOWN, ""),
    (said("env_live", "PermissionError: [Errno 13] Permission denied: '/etc/nccl.conf'"), "nccl_conf", UNKNOWN, ""),
    (healthy(), "docker", OK, "26.1.3, images in /var/lib/docker (overlay2)"),
    *(
        (said("host.docker", output, code), "docker", level, words)
        for code, output, level, words in (
            (1, "no program docker", FAIL, "docker: not installed"),
            (127, "", UNKNOWN, "no container engine answers (host.docker: exit code 127)"),  # nobody looked for it
            (1, DENIED, FAIL, "docker: this user may not use it"),
            (1, "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", FAIL, "docker: its daemon does"),
            (1, 'executing "" at <.ServerVersion>: no such field', UNKNOWN, "no container engine answers"),
        )
    ),
    *(
        (said("host.docker", DENIED), check, UNKNOWN, "no container engine answers (host.docker: exit code 1)")
        for check in ("docker_gpu", "docker_disk", "image")
    ),
    (healthy(), "docker_gpu", OK, "runtime nvidia, hook nvidia-container-runtime-hook"),
    (changed("docker", ways=[]), "docker_gpu", FAIL, "no NVIDIA runtime, hook or CDI device list"),
    (changed("docker", ways=[], has_gpus=False), "docker_gpu", SKIP, "the NVIDIA driver is not loaded"),
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
    (changed("system", locked="65536", adapters=0), "memlock", OK, "0 MiB for a session; only RDMA adapters need"),
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
        for check in ("docker", "docker_gpu", "docker_disk")
    ),
    (changed("docker", ways=[]), "docker_gpu", SKIP, f"no NVIDIA runtime, hook or CDI device list; {UNNEEDED}"),
    (changed("docker", room=room(0)), "docker_disk", OK, f"0 MiB free; {UNNEEDED}"),
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


def test_traits_leave_out_what_the_image_brings() -> None:
    told = GROUP.traits(healthy(), DOCKER)
    assert re.fullmatch("image [0-9a-f]{12}", told["host.versions"])
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


# Several nodes: memory within a tolerance, room for the image, who lacks it.

ABSENT = "Error: No such image: burst:cuda"


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ((1000, 1000, 1000, 970), [(OK, "970.0 GiB")] * 4),
        ((1000, 1000, 1000, 969), [(OK, "")] * 3 + [(WARN, "969.0 GiB, the usual node has 1000.0 GiB")]),
        ((1000, 1000, 1000, 1031), [(OK, "")] * 3 + [(WARN, "1031.0 GiB, the usual node has 1000.0 GiB")]),
        # Who tells nothing does not count.
        ((1000, 1000, None), [(OK, ""), (OK, ""), (UNKNOWN, "the node did not tell how much memory it has")]),
        ((), []),
    ],
)
def test_memory_may_differ_by_three_percent(
    totals: tuple[int | None, ...], expected: list[tuple[Verdict, str]]
) -> None:
    nodes = {}
    for at, total in enumerate(totals):
        system = {**HEALTHY["host.system"], "memory": [(total or 0) * GIB, 0]}
        nodes[f"n{at}"] = healthy(f"n{at}", system=system) if total else NodeProbe(f"n{at}")
    found = GROUP.compare(nodes, BARE)
    assert [finding.severity for finding in found] == [severity for severity, _ in expected]
    assert all(text in ("", finding.observed) for finding, (_, text) in list(zip(found, expected, strict=True))[-1:])
    usual = "" if len(totals) < 2 else "1000.0 GiB within 3%"
    assert all(finding.expected == usual for finding in found)


def node(name: str, free_gib: int, *, has_image: bool) -> NodeProbe:
    probe = healthy(name, docker={**HEALTHY["host.docker"], "room": room(free_gib << 30)})
    return probe if has_image else changed_section(probe, "host.image", output=ABSENT, exit_code=1)


FULL = "FAIL host.docker_disk (/var/lib/docker): {}.0 GiB free; expected: at least {}.0 GiB free for burst:cuda"
LACKS = "FAIL host.image: burst:cuda is on {} of {} nodes and not on this one"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([(18, True)], []),  # its image is of 18 GiB: it must hold it once more
        ([(17, True)], [FULL.format(17, 18)]),
        ([(100, True), (36, False)], [LACKS.format(1, 2)]),  # without it twice
        ([(100, True), (35, False), (100, True)], [FULL.format(35, 36), LACKS.format(2, 3)]),
        ([(100, False), (0, False)], []),  # that nobody has it is no difference
    ],
)
def test_the_image_is_on_all_nodes_or_has_room(nodes: list[tuple[int, bool]], expected: list[str]) -> None:
    probes = {f"n{at}": node(f"n{at}", free, has_image=has) for at, (free, has) in enumerate(nodes)}
    assert told(GROUP.compare(probes, DOCKER)) == expected
    assert {one.check for one in GROUP.compare(probes, BARE)} == {"host.memory"}  # without containers nobody's matter
