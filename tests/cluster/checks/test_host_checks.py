"""Group host on hand-written answers: each threshold from both sides, and what a node lacks or names strangely."""

from __future__ import annotations

from dataclasses import replace

import pytest
from host_sections import (
    BARE,
    BARE_SOFTWARE,
    DOCKER,
    HEALTHY,
    changed,
    damaged,
    ended,
    findings,
    healthy,
    room,
    verdict,
)
from testkit.check_fakes import Groups

from cluster.checks.finding import Verdict, worst
from cluster.survey.section import NodeProbe, Section, SectionState
from engine.config.cluster import ClusterConfig, ContainerConfig

GROUP = Groups("host")

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN


GIB, MIB = 1 << 30, 1 << 20


def disk(place: str, room: object) -> NodeProbe:
    return changed("disk", **{place: room})


CASES: list[tuple[NodeProbe, str, Verdict]] = [
    *((disk("/", room(free * GIB)), "disk", level) for free, level in ((0, FAIL), (1, WARN), (9, WARN), (10, OK))),
    *((disk("/tmp", room(free * GIB)), "disk", level) for free, level in ((0, FAIL), (1, WARN), (4, WARN), (5, OK))),
    *(
        (disk("/", room(inodes=free, of=1000)), "inodes", level)
        for free, level in ((9, FAIL), (10, WARN), (49, WARN), (50, OK))
    ),
    (disk("/", room(inodes=0, of=0, kind="btrfs")), "inodes", OK),  # made as needed
    *(
        (disk("shm", room(free * MIB, kind="tmpfs")), "shm", level)
        for free, level in ((64, FAIL), (65, WARN), (1023, WARN), (1024, OK))
    ),
    (disk("shm", room(kind="overlay")), "shm", WARN),
    (disk("shm", None), "shm", FAIL),
    (disk("shm", {**room(), "size": 0}), "shm", UNKNOWN),
    *(
        (changed("docker", room=room(free * GIB)), "docker_disk", level)
        for free, level in ((4, FAIL), (5, WARN), (39, WARN), (40, OK))
    ),
    (changed("docker", room=None), "docker_disk", UNKNOWN),
    *(
        (changed("shared", room=room(free * GIB)), "shared", level)
        for free, level in ((0, FAIL), (1, WARN), (49, WARN), (50, OK))
    ),
    (changed("system", files=[1000, 1023]), "nofile", FAIL),
    (changed("system", files=[1024, 1024]), "nofile", WARN),
    (changed("system", files=[8191, 1048576]), "nofile", WARN),
    (changed("system", files=[8192, 8192]), "nofile", OK),
    (changed("system", files=["unlimited", "unlimited"]), "nofile", OK),
    (changed("system", files=["lots", 1]), "nofile", UNKNOWN),
    (changed("system", locked=None), "memlock", UNKNOWN),
    (changed("system", memory=[0, 0]), "memory_free", UNKNOWN),
    *(
        (changed("system", memory=[1000, left]), "memory_free", level)
        for left, level in ((49, FAIL), (50, WARN), (199, WARN), (200, OK))
    ),
    # no process at all is no proof of none
    (changed("runs", read=0), "runs", UNKNOWN),
    (changed("runs", runs=[[77, "ada", 64.0, "python3"]]), "runs", UNKNOWN),
    (healthy(nccl=[["/etc/nccl.conf", {"NCCL_P2P_DISABLE": "1"}], ["session", {}]]), "nccl_conf", WARN),
    (healthy(nccl=[["~/.nccl.conf", {"NCCL_DEBUG": "TRACE"}], ["session", {}]]), "nccl_conf", WARN),
    (healthy(nccl=[["session", {"NCCL_P2P_DISABLE": "0"}]]), "nccl_conf", OK),
    (healthy(nccl=[["/etc/nccl.conf", {}]]), "nccl_conf", UNKNOWN),
    (ended("host.nccl", 1, "PermissionError: [Errno 13] Permission denied: '/etc/nccl.conf'"), "nccl_conf", UNKNOWN),
    *(
        (changed("docker", version=version), "docker", level)
        for version, level in (("18.09.9", FAIL), ("19.03.0", OK), ("28.2.2", OK), ("master", UNKNOWN))
    ),
    (ended("host.image", 1, "Error response from daemon: No such image: burst:cuda"), "image", WARN),
    (ended("host.image", 1, "Cannot connect to the Docker daemon"), "image", UNKNOWN),
    *((healthy(image=told), "image", UNKNOWN) for told in (["amd64", "linux", "x", [], 1], ["amd64", 1], {})),
    (changed("shared", room=None, trouble="Stale file handle"), "shared", FAIL),
    (ended("host.shared", 127), "shared", UNKNOWN),
    (damaged(Section("host.shared", "", None, SectionState.TIMED_OUT)), "shared", FAIL),  # the file server hangs
]


@pytest.mark.parametrize(("probe", "name", "expected"), CASES)
def test_one_answer_decides(probe: NodeProbe, name: str, expected: Verdict) -> None:
    found = findings(probe, f"host.{name}")
    assert worst(finding.severity for finding in found) is expected
    assert all(finding.remedy for finding in found if finding.severity in (WARN, FAIL))


def test_a_healthy_node_has_an_answer_to_every_check_and_nothing_worse_than_skip() -> None:
    found = GROUP.check(healthy(), DOCKER)
    assert {finding.check for finding in found} == set(GROUP.checks)
    assert {finding.severity for finding in found} == {OK, SKIP}


def test_a_node_that_answered_nothing_has_every_check_and_none_is_ok() -> None:
    found = GROUP.check(NodeProbe("node1"), DOCKER)
    assert {finding.check: finding.severity for finding in found} == dict.fromkeys(GROUP.checks, UNKNOWN)


def test_a_memlock_limit_matters_only_to_bare_ranks_with_rdma() -> None:
    limited = changed("system", locked="65536")
    (found,) = findings(limited, "host.memlock", BARE)
    assert (found.severity, "2 RDMA adapters must lock" in found.observed) == (FAIL, True)
    assert verdict(limited, "host.memlock", DOCKER) is OK
    assert verdict(changed("system", locked="65536", adapters=0), "host.memlock", BARE) is OK


def test_leftover_runs_are_named_with_pid_owner_and_age() -> None:
    runs = [
        [77, "ada", 3600.0, "python3", "20260105-101010-abcdef"],
        [78, "ada", 3600.0, "pt_main_thread", "20260105-101010-abcdef"],
        [99, "uid 1001", 100.0, "python3", "20260106-111111-fedcba"],
    ]
    first, second = findings(changed("runs", runs=runs), "host.runs")
    assert (first.severity, first.device) == (WARN, "20260105-101010-abcdef")
    assert first.observed == "2 processes of ada: 77 python3 (60 min), 78 pt_main_thread (60 min)"
    assert "of uid 1001" in second.observed


def test_processes_of_other_users_that_could_not_be_looked_into_are_admitted() -> None:
    probe = changed("runs", read=12, unread=3444)
    assert "3444 of others" in findings(probe, "host.runs")[0].observed


@pytest.mark.parametrize(
    ("version", "bare", "docker"),
    [("3.12.1", OK, OK), ("3.11.0", OK, OK), ("3.10.14", WARN, OK), ("3.9.0", WARN, OK), ("3.8.20", FAIL, FAIL)],
)
def test_ranks_need_a_recent_python_and_their_supervisor_3_9(version: str, bare: Verdict, docker: Verdict) -> None:
    probe = healthy(software={**BARE_SOFTWARE, "python": version})
    assert (verdict(probe, "host.python", BARE), verdict(probe, "host.python", DOCKER)) == (bare, docker)


def test_python_and_its_packages_of_a_bare_node() -> None:
    bare = healthy(software=BARE_SOFTWARE)
    told = [findings(bare, check, BARE)[0].observed for check in ("host.torch", "host.nccl")]
    assert told == ["2.9.1+cu128", "2.27.5"]
    none = healthy(software=None)
    assert [verdict(none, "host.python", config) for config in (BARE, DOCKER)] == [FAIL, FAIL]
    unlisted = healthy(software={"python": "3.11.2", "packages": None})
    assert verdict(unlisted, "host.torch", BARE) is UNKNOWN
    without = healthy(software={"python": "3.11.2", "packages": {}})
    assert verdict(without, "host.torch", BARE) is WARN


def test_nccl_settings_are_shown_with_their_place() -> None:
    told = [["/etc/nccl.conf", {"NCCL_DEBUG": "WARN"}], ["session", {"NCCL_SOCKET_IFNAME": "=bond0"}]]
    (fine,) = findings(healthy(nccl=told), "host.nccl_conf")
    assert fine.severity is OK
    assert fine.observed == "NCCL_DEBUG=WARN (/etc/nccl.conf), NCCL_SOCKET_IFNAME==bond0 (session)"


@pytest.mark.parametrize(
    ("code", "output", "expected", "words"),
    [
        (1, "no program docker", FAIL, "docker: not installed"),
        (127, "", UNKNOWN, "exit code 127"),  # without Python nobody looked for it
        (1, "permission denied while trying to connect to the Docker daemon socket", FAIL, "may not use"),
        (1, "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", FAIL, "does not answer"),
        (1, 'template: :1:2: executing "" at <.ServerVersion>: no such field', UNKNOWN, "exit code 1"),
    ],
)
def test_an_engine_that_does_not_answer(code: int, output: str, expected: Verdict, words: str) -> None:
    probe = ended("host.docker", code, output)
    (finding,) = findings(probe, "host.docker")
    assert finding.severity is expected
    assert words in finding.observed
    for check in ("host.docker_gpu", "host.docker_disk", "host.image"):
        assert verdict(probe, check) is UNKNOWN
        assert verdict(probe, check, BARE) is SKIP
    assert verdict(probe, "host.docker", BARE) is SKIP


def test_how_gpus_reach_containers() -> None:
    (found,) = findings(healthy(), "host.docker_gpu")
    assert (found.severity, found.observed) == (OK, "runtime nvidia, hook nvidia-container-runtime-hook")
    assert verdict(changed("docker", ways=[]), "host.docker_gpu") is FAIL
    assert verdict(changed("docker", ways=[], has_gpus=False), "host.docker_gpu") is SKIP


def test_the_identity_of_an_image_is_what_it_is_made_of() -> None:
    def identity(probe: NodeProbe) -> str:
        return GROUP.traits(probe, ClusterConfig())["host.image"]

    *told, _ = HEALTHY["host.image"]
    assert identity(healthy(image=[*told, 1])) == identity(healthy())
    for place, other in enumerate(("arm64", "freebsd", "2026-01-05T10:00:01Z", ["sha256:aa", "sha256:cc"])):
        assert identity(healthy(image=[*told[:place], other, *told[place + 1 :], 1])) != identity(healthy())


def test_the_shared_folder_as_the_node_sees_it() -> None:
    (finding,) = findings(changed("shared", room=None, trouble="Stale file handle"), "host.shared")
    assert (finding.severity, "Stale file handle" in finding.observed) == (FAIL, True)
    assert verdict(healthy(), "host.shared", BARE) is SKIP
    no_image = ClusterConfig(container=ContainerConfig(runtime="docker"))
    assert verdict(healthy(), "host.image", no_image) is SKIP


def test_traits_leave_out_what_the_image_brings() -> None:
    told = GROUP.traits(healthy(), DOCKER)
    assert {"host.docker", "host.image", "host.nccl_conf"} == set(told)
    bare = GROUP.traits(healthy(software=BARE_SOFTWARE), ClusterConfig())
    assert (bare["host.python"], bare["host.torch"], bare["host.nccl"]) == ("3.11.9", "2.9.1+cu128", "2.27.5")


def test_the_probe_is_told_what_it_must_know() -> None:
    assert GROUP.settings(DOCKER) == {
        "BURST_ENGINE": "docker",
        "BURST_IMAGE": "burst:cuda",
        "BURST_SHARED_FOLDER": "/mnt/shared",
    }
    assert "BURST_IMAGE" not in GROUP.settings(BARE)
    assert "BURST_PYTHON" not in GROUP.settings(replace(DOCKER, python="/opt/python"))
    assert GROUP.settings(replace(BARE, python="/opt/python"))["BURST_PYTHON"] == "/opt/python"
