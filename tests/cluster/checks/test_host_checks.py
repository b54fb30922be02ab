"""Group host on hand-written answers: each threshold from both sides, and what a node lacks or names strangely."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from host_sections import (
    BARE,
    BARE_SOFTWARE,
    DOCKER,
    GIB_BLOCKS,
    HEALTHY,
    damaged,
    edited,
    ended,
    findings,
    healthy,
    verdict,
)
from testkit.check_fakes import Groups

from cluster.checks.finding import Verdict, worst
from cluster.survey.section import NodeProbe, Section, SectionState
from engine.config.cluster import ClusterConfig, ContainerConfig

GROUP = Groups("host")

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN


def disks(*, root: int = 100, tmp: int = 100, shm: int = 9000, inodes: int = 500, kind: str = "tmpfs") -> NodeProbe:
    """Section host.disk with free GiB (of shm MiB); inodes free of 1000."""
    return healthy(
        disk=f"root 4096 {400 * GIB_BLOCKS} {root * GIB_BLOCKS} 1000 {inodes} ext2/ext3\n"
        f"tmp 4096 {400 * GIB_BLOCKS} {tmp * GIB_BLOCKS} 1000 500 xfs\n"
        f"shm 1048576 1024000 {shm} 1000 500 {kind}"
    )


def limits(soft: object, hard: object) -> NodeProbe:
    return healthy(limits=f"memlock unlimited\nnofile_soft {soft}\nnofile_hard {hard}")


def memory(available: int) -> NodeProbe:
    return healthy(memory=f"MemTotal: 1000 kB\nMemAvailable: {available} kB")


def docker_root(free: int) -> NodeProbe:
    return edited("docker", "459276288 229638144", f"459276288 {free * GIB_BLOCKS}")


def shared(free: int) -> NodeProbe:
    return healthy(shared=f"shared 1073741824 100 {free} 0 0 nfs")


WITHOUT_SHM = "\n".join([*HEALTHY["host.disk"].splitlines()[:2], "absent shm"])
BTRFS = HEALTHY["host.disk"].replace("117440512 110000000", "0 0")
WITHOUT_RUN_ID = '{"read": 5, "unread": 0, "runs": [[77, "ada", 64.0, "python3"]]}'

CASES: list[tuple[NodeProbe, str, Verdict]] = [
    *((disks(root=free), "disk", severity) for free, severity in ((0, FAIL), (1, WARN), (9, WARN), (10, OK))),
    *((disks(tmp=free), "disk", severity) for free, severity in ((0, FAIL), (1, WARN), (4, WARN), (5, OK))),
    *((disks(inodes=free), "inodes", severity) for free, severity in ((9, FAIL), (10, WARN), (49, WARN), (50, OK))),
    (healthy(disk=BTRFS), "inodes", OK),  # made as needed
    *((disks(shm=free), "shm", severity) for free, severity in ((64, FAIL), (65, WARN), (1023, WARN), (1024, OK))),
    (disks(kind="overlayfs"), "shm", WARN),
    (healthy(disk=WITHOUT_SHM), "shm", FAIL),
    *((docker_root(free), "docker_disk", level) for free, level in ((4, FAIL), (5, WARN), (39, WARN), (40, OK))),
    *((shared(free), "shared", severity) for free, severity in ((0, FAIL), (1, WARN), (49, WARN), (50, OK))),
    (limits(1000, 1023), "nofile", FAIL),
    (limits(1024, 1024), "nofile", WARN),
    (limits(8191, 1048576), "nofile", WARN),
    (limits(8192, 8192), "nofile", OK),
    (limits("unlimited", "unlimited"), "nofile", OK),
    (limits("lots", 1), "nofile", UNKNOWN),
    *((memory(left), "memory_free", level) for left, level in ((49, FAIL), (50, WARN), (199, WARN), (200, OK))),
    (edited("limits", "memlock unlimited", "memlock -1"), "memlock", UNKNOWN),
    (edited("limits", "memlock unlimited", "memlock unlimited\nmemlock 8"), "memlock", UNKNOWN),
    # no process at all is no proof of none
    (edited("runs", "3456", "0"), "runs", UNKNOWN),
    (edited("runs", "}", ""), "runs", UNKNOWN),
    (healthy(runs=WITHOUT_RUN_ID), "runs", UNKNOWN),
    (healthy(nccl="system NCCL_P2P_DISABLE=1\nend"), "nccl_conf", WARN),
    (healthy(nccl="user NCCL_DEBUG=TRACE\nend"), "nccl_conf", WARN),
    (healthy(nccl="session NCCL_P2P_DISABLE=0\nend"), "nccl_conf", OK),
    (healthy(nccl="unreadable system\nabsent user\nend"), "nccl_conf", UNKNOWN),  # not an absent one
    *(
        (edited("docker", "26.1.3", version), "docker", severity)
        for version, severity in (("18.09.9", FAIL), ("19.03.0", OK), ("28.2.2", OK), ("master-dockerproject", UNKNOWN))
    ),
    (edited("docker", "hook nvidia-container-runtime-hook\n", ""), "docker_gpu", OK),  # a registered runtime
    (ended("host.image", 1, "[]\nError response from daemon: No such image: burst:cuda"), "image", WARN),
    (ended("host.image", 1, "Cannot connect to the Docker daemon"), "image", UNKNOWN),
    (healthy(image="unset"), "image", UNKNOWN),
    *(
        (healthy(image=text), "image", UNKNOWN)
        for text in ('image "amd64" "linux" "x" []\nsize 1', 'image "amd64"\nsize 1', "image {\nsize 1")
    ),
    (ended("host.shared", 1, "stat: cannot read file system information"), "shared", FAIL),
    (ended("host.shared", 127), "shared", UNKNOWN),
    (healthy(shared="unset"), "shared", UNKNOWN),
    (damaged(Section("host.shared", "", None, SectionState.TIMED_OUT)), "shared", FAIL),  # the file server hangs
    (damaged(Section("host.shared", "", None, SectionState.CUT_OFF)), "shared", UNKNOWN),
]


@pytest.mark.parametrize(("probe", "name", "expected"), CASES)
def test_one_answer_decides(probe: NodeProbe, name: str, expected: Verdict) -> None:
    found = findings(probe, f"host.{name}")
    assert worst(finding.severity for finding in found) is expected
    assert all(finding.remedy for finding in found if finding.severity in (WARN, FAIL))


def test_a_healthy_node_has_an_answer_to_every_check_and_nothing_worse_than_skip() -> None:
    found = GROUP.check(healthy(), DOCKER)
    assert {finding.check for finding in found} == set(GROUP.checks)
    assert worst(finding.severity for finding in found) is SKIP


def test_a_node_that_answered_nothing_has_every_check_and_none_is_ok() -> None:
    found = GROUP.check(NodeProbe("node1"), DOCKER)
    assert {finding.check: finding.severity for finding in found} == dict.fromkeys(GROUP.checks, UNKNOWN)


def test_a_memlock_limit_matters_only_to_bare_ranks_with_rdma() -> None:
    limited = HEALTHY["host.limits"].replace("unlimited", "65536")
    (found,) = findings(healthy(limits=limited), "host.memlock", BARE)
    assert (found.severity, "2 RDMA adapters must lock" in found.observed) == (FAIL, True)
    assert verdict(healthy(limits=limited), "host.memlock", DOCKER) is OK
    without = "\n".join(line for line in limited.splitlines() if not line.startswith("rdma"))
    assert verdict(healthy(limits=without), "host.memlock", BARE) is OK


def test_leftover_runs_are_named_with_pid_owner_and_age() -> None:
    text = json.dumps(
        {
            "read": 500,
            "unread": 0,
            "runs": [
                [77, "ada", 3600.0, "python3", "20260105-101010-abcdef"],
                [78, "ada", 3600.0, "pt_main_thread", "20260105-101010-abcdef"],
                [99, "uid 1001", 100.0, "python3", "20260106-111111-fedcba"],
            ],
        }
    )
    first, second = findings(healthy(runs=text), "host.runs")
    assert (first.severity, first.device) == (WARN, "20260105-101010-abcdef")
    assert first.observed == "2 processes of ada: 77 python3 (60 min), 78 pt_main_thread (60 min)"
    assert "of uid 1001" in second.observed


def test_processes_of_other_users_that_could_not_be_looked_into_are_admitted() -> None:
    probe = edited("runs", '"read": 3456, "unread": 0', '"read": 12, "unread": 3444')
    assert "3444 of others" in findings(probe, "host.runs")[0].observed


@pytest.mark.parametrize(
    ("version", "bare", "docker"),
    [("3.12.1", OK, OK), ("3.11.0", OK, OK), ("3.10.14", WARN, OK), ("3.9.0", WARN, OK), ("3.8.20", FAIL, FAIL)],
)
def test_ranks_need_a_recent_python_and_their_supervisor_3_9(version: str, bare: Verdict, docker: Verdict) -> None:
    probe = healthy(software=BARE_SOFTWARE.replace("3.11.9", version))
    assert (verdict(probe, "host.python", BARE), verdict(probe, "host.python", DOCKER)) == (bare, docker)


def test_python_and_its_packages_of_a_bare_node() -> None:
    bare = healthy(software=BARE_SOFTWARE)
    told = [findings(bare, check, BARE)[0].observed for check in ("host.torch", "host.nccl")]
    assert told == ["2.9.1+cu128", "2.27.5"]
    none = healthy(software="kernel 5.15.0\nruntime bare\nabsent python")
    assert [verdict(none, "host.python", config) for config in (BARE, DOCKER)] == [FAIL, FAIL]
    unlisted = healthy(software="kernel 5.15.0\nruntime bare\npython 3.11.2\nfailed packages")
    assert verdict(unlisted, "host.torch", BARE) is UNKNOWN
    without = healthy(software="kernel 5.15.0\nruntime bare\npython 3.11.2\npackages read")
    assert verdict(without, "host.torch", BARE) is WARN


def test_nccl_settings_are_shown_with_their_place() -> None:
    text = "system NCCL_DEBUG=WARN\nabsent user\nsession NCCL_SOCKET_IFNAME==bond0\nend"
    (fine,) = findings(healthy(nccl=text), "host.nccl_conf")
    assert fine.severity is OK
    assert fine.observed == "NCCL_DEBUG=WARN (/etc/nccl.conf), NCCL_SOCKET_IFNAME==bond0 (session)"


@pytest.mark.parametrize(
    ("code", "output", "expected", "words"),
    [
        (127, "", FAIL, "not installed"),
        (1, "permission denied while trying to connect to the Docker daemon socket", FAIL, "may not use"),
        (1, "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", FAIL, "does not answer"),
        (125, 'template: :1:2: executing "" at <.ServerVersion>: no such field', UNKNOWN, "exit code 125"),
        # `docker info` of version 28.0 exits with 0 when the daemon is dead.
        (0, 'ServerVersion ""\nCannot connect to the Docker daemon.', FAIL, "does not answer"),
    ],
)
def test_an_engine_that_does_not_answer(code: int, output: str, expected: Verdict, words: str) -> None:
    probe = ended("host.docker", code, output)
    (finding,) = findings(probe, "host.docker")
    assert finding.severity is expected
    assert words in finding.observed
    for check in ("host.docker_gpu", "host.docker_disk"):
        assert verdict(probe, check) is UNKNOWN
        assert verdict(probe, check, BARE) is SKIP
    assert verdict(probe, "host.docker", BARE) is SKIP


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("hook nvidia-container-runtime-hook\ngpus", OK),
        ("cdi nvidia.yaml\ngpus", OK),
        ("hook nvidia-ctk\ngpus", FAIL),
        ("gpus", FAIL),
        ("", SKIP),
    ],
)
def test_how_gpus_reach_containers(lines: str, expected: Verdict) -> None:
    text = HEALTHY["host.docker"].partition("gpus\n")[2].replace(',"nvidia":{"path":"nvidia-container-runtime"}', "")
    assert verdict(healthy(docker=f"{lines}\n{text}"), "host.docker_gpu") is expected


def test_the_identity_of_an_image_is_what_it_is_made_of() -> None:
    def identity(probe: NodeProbe) -> str:
        return GROUP.traits(probe, ClusterConfig())["host.image"]

    assert identity(edited("image", "size 19327352832", "size 1")) == identity(healthy())
    for old, new in (("sha256:bb", "sha256:cc"), ("amd64", "arm64"), ("10:00:00", "10:00:01"), ("linux", "freebsd")):
        assert identity(edited("image", old, new)) != identity(healthy())


def test_the_shared_folder_as_the_node_sees_it() -> None:
    stale = "ls: cannot access '/mnt/shared': Stale file handle\nabsent"
    (finding,) = findings(healthy(shared=stale), "host.shared")
    assert (finding.severity, "Stale file handle" in finding.evidence) == (FAIL, True)
    assert verdict(healthy(shared="unset"), "host.shared", BARE) is SKIP
    no_image = ClusterConfig(container=ContainerConfig(runtime="docker"))
    assert verdict(healthy(image="unset"), "host.image", no_image) is SKIP


def test_traits_leave_out_what_the_image_brings() -> None:
    told = GROUP.traits(healthy(), ClusterConfig())
    assert {"host.docker", "host.image", "host.nccl_conf"} == set(told)
    bare = GROUP.traits(healthy(software=BARE_SOFTWARE), ClusterConfig())
    assert (bare["host.python"], bare["host.torch"], bare["host.nccl"]) == ("3.11.9", "2.9.1+cu128", "2.27.5")


def test_the_probe_is_told_what_it_must_know() -> None:
    assert GROUP.settings(DOCKER) == {
        "BURST_RUNTIME": "docker",
        "BURST_ENGINE": "docker",
        "BURST_IMAGE": "burst:cuda",
        "BURST_SHARED_FOLDER": "/mnt/shared",
    }
    assert "BURST_IMAGE" not in GROUP.settings(BARE)
    assert "BURST_PYTHON" not in GROUP.settings(replace(DOCKER, python="/opt/python"))
    assert GROUP.settings(replace(BARE, python="/opt/python"))["BURST_PYTHON"] == "/opt/python"
