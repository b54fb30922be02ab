"""Group host on hand-written answers: each threshold from both sides, and what a node lacks or names strangely."""

from __future__ import annotations

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

from cluster.checks.finding import Verdict, worst
from cluster.checks.host import GROUP
from cluster.probe.section import NodeProbe, Section, SectionState
from engine.config_cluster import ClusterConfig, ContainerConfig

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN
EVERY_CHECK = {
    *("host.disk", "host.inodes", "host.shm", "host.docker_disk", "host.memlock", "host.nofile", "host.memory_free"),
    *("host.runs", "host.python", "host.torch", "host.nccl", "host.nccl_conf"),
    *("host.docker", "host.docker_gpu", "host.image", "host.shared"),
}


def disks(*, root: int = 100, tmp: int = 100, shm: int = 100, inodes: int = 500, shm_kind: str = "tmpfs") -> str:
    """Section host.disk with free GiB; inodes free of 1000."""
    return (
        f"root 4096 {400 * GIB_BLOCKS} {root * GIB_BLOCKS} 1000 {inodes} ext2/ext3\n"
        f"tmp 4096 {400 * GIB_BLOCKS} {tmp * GIB_BLOCKS} 1000 500 xfs\n"
        f"shm 1048576 1024000 {shm} 1000 500 {shm_kind}"
    )


def test_a_healthy_node_has_an_answer_to_every_check_and_nothing_worse_than_skip() -> None:
    found = GROUP.check(healthy(), DOCKER)
    assert {finding.check for finding in found} == EVERY_CHECK
    assert worst(finding.severity for finding in found) is SKIP
    assert {finding.node for finding in found} == {"node1"}


def test_a_node_that_answered_nothing_has_every_check_and_none_is_ok() -> None:
    found = GROUP.check(NodeProbe("node1"), DOCKER)
    assert {finding.check for finding in found} == EVERY_CHECK
    assert {finding.severity for finding in found} == {UNKNOWN}


@pytest.mark.parametrize(("free", "expected"), [(0, FAIL), (1, WARN), (9, WARN), (10, OK)])
def test_root_disk_thresholds(free: int, expected: Verdict) -> None:
    on_root = [one for one in findings(healthy(disk=disks(root=free)), "host.disk") if one.device == "/"]
    assert [one.severity for one in on_root] == [expected]


@pytest.mark.parametrize(("free", "expected"), [(0, FAIL), (1, WARN), (4, WARN), (5, OK)])
def test_tmp_disk_thresholds(free: int, expected: Verdict) -> None:
    on_tmp = [one for one in findings(healthy(disk=disks(tmp=free)), "host.disk") if one.device == "/tmp"]
    assert [one.severity for one in on_tmp] == [expected]


@pytest.mark.parametrize(("free", "expected"), [(9, FAIL), (10, WARN), (49, WARN), (50, OK)])
def test_inode_thresholds_in_thousandths(free: int, expected: Verdict) -> None:
    on_root = [one for one in findings(healthy(disk=disks(inodes=free)), "host.inodes") if one.device == "/"]
    assert [one.severity for one in on_root] == [expected]


def test_a_file_system_without_a_fixed_number_of_inodes_has_enough() -> None:
    text = disks().replace("1000 500 ext2/ext3", "0 0 btrfs")
    assert {one.severity for one in findings(healthy(disk=text), "host.inodes")} == {OK}


@pytest.mark.parametrize(("free_mib", "expected"), [(64, FAIL), (65, WARN), (1023, WARN), (1024, OK)])
def test_shm_thresholds(free_mib: int, expected: Verdict) -> None:
    assert verdict(healthy(disk=disks(shm=free_mib)), "host.shm") is expected


def test_shm_on_a_disk_or_absent_is_told() -> None:
    assert verdict(healthy(disk=disks(shm_kind="overlayfs", shm=9000)), "host.shm") is WARN
    absent = "\n".join([*disks().splitlines()[:2], "absent shm"])
    assert verdict(healthy(disk=absent), "host.shm") is FAIL


@pytest.mark.parametrize(("free", "expected"), [(4, FAIL), (5, WARN), (39, WARN), (40, OK)])
def test_docker_root_thresholds_while_the_size_of_the_image_is_unknown(free: int, expected: Verdict) -> None:
    probe = edited("docker", "459276288 229638144", f"459276288 {free * GIB_BLOCKS}")
    assert verdict(probe, "host.docker_disk") is expected


@pytest.mark.parametrize(("free", "expected"), [(0, FAIL), (1, WARN), (49, WARN), (50, OK)])
def test_shared_folder_thresholds(free: int, expected: Verdict) -> None:
    assert verdict(healthy(shared=f"shared 1073741824 100 {free} 0 0 nfs"), "host.shared") is expected


def test_a_memlock_limit_matters_only_to_bare_ranks_with_rdma() -> None:
    limited = HEALTHY["host.limits"].replace("unlimited", "65536")
    assert verdict(healthy(limits=limited), "host.memlock", BARE) is FAIL
    assert "RDMA adapters must lock" in findings(healthy(limits=limited), "host.memlock", BARE)[0].observed
    assert verdict(healthy(limits=limited), "host.memlock", DOCKER) is OK
    without = "\n".join(line for line in limited.splitlines() if not line.startswith("rdma"))
    assert verdict(healthy(limits=without), "host.memlock", BARE) is OK


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(1000, 1023, FAIL), (1024, 1024, WARN), (8191, 1048576, WARN), (8192, 8192, OK), ("unlimited", "unlimited", OK)],
)
def test_nofile_thresholds(soft: object, hard: object, expected: Verdict) -> None:
    text = f"memlock unlimited\nnofile_soft {soft}\nnofile_hard {hard}"
    assert verdict(healthy(limits=text), "host.nofile") is expected


@pytest.mark.parametrize(("available", "expected"), [(49, FAIL), (50, WARN), (199, WARN), (200, OK)])
def test_memory_in_use_thresholds(available: int, expected: Verdict) -> None:
    text = f"MemTotal: 1000 kB\nMemAvailable: {available} kB"
    assert verdict(healthy(memory=text), "host.memory_free") is expected


def test_leftover_runs_are_named_with_pid_owner_and_age() -> None:
    text = (
        "uptime 10000.00\nticks 100\nuser 0\nread 500\nunread 0\n"
        "run 77 1000 640000 python3\nid 77 20260105-101010-abcdef\nowner 1000 ada\n"
        "run 78 1000 640000 pt_main_thread\nid 78 20260105-101010-abcdef\n"
        "run 99 1001 990000 python3\nid 99 20260106-111111-fedcba\nowner 1001 \nend"
    )
    first, second = findings(healthy(runs=text), "host.runs")
    assert (first.severity, first.device) == (WARN, "20260105-101010-abcdef")
    assert "2 processes of ada" in first.observed
    assert "77 python3 (60 min)" in first.observed
    assert "of uid 1001" in second.observed


def test_processes_of_other_users_that_could_not_be_looked_into_are_admitted() -> None:
    probe = edited("runs", "read 3456\nunread 0", "read 12\nunread 3444")
    assert "3444 of others" in findings(probe, "host.runs")[0].observed


def test_no_process_at_all_is_no_proof_of_none() -> None:
    assert verdict(edited("runs", "read 3456", "read 0"), "host.runs") is UNKNOWN
    assert verdict(edited("runs", "\nend", ""), "host.runs") is UNKNOWN
    without_id = "uptime 1.0\nticks 100\nread 5\nunread 0\nrun 77 1000 64 python3\nend"
    assert verdict(healthy(runs=without_id), "host.runs") is UNKNOWN


@pytest.mark.parametrize(
    ("version", "bare", "docker"),
    [("3.12.1", OK, OK), ("3.11.0", OK, OK), ("3.10.14", WARN, OK), ("3.9.0", WARN, OK), ("3.8.20", FAIL, FAIL)],
)
def test_ranks_need_a_recent_python_and_their_supervisor_3_9(version: str, bare: Verdict, docker: Verdict) -> None:
    probe = healthy(software=BARE_SOFTWARE.replace("3.11.9", version))
    assert (verdict(probe, "host.python", BARE), verdict(probe, "host.python", DOCKER)) == (bare, docker)


def test_python_and_its_packages_of_a_bare_node() -> None:
    bare = healthy(software=BARE_SOFTWARE)
    assert [findings(bare, check, BARE)[0].observed for check in ("host.torch", "host.nccl")] == [
        "2.9.1+cu128",
        "2.27.5",
    ]
    none = healthy(software="kernel 5.15.0\nruntime bare\nabsent python")
    assert verdict(none, "host.python", BARE) is FAIL
    assert verdict(none, "host.python", DOCKER) is FAIL
    unlisted = healthy(software="kernel 5.15.0\nruntime bare\npython 3.11.2\nfailed packages")
    assert verdict(unlisted, "host.torch", BARE) is UNKNOWN
    without = healthy(software="kernel 5.15.0\nruntime bare\npython 3.11.2\npackages read")
    assert verdict(without, "host.torch", BARE) is WARN


def test_nccl_settings_are_shown_and_crippling_ones_warned_of() -> None:
    text = "system NCCL_DEBUG=WARN\nabsent user\nsession NCCL_SOCKET_IFNAME==bond0\nend"
    (fine,) = findings(healthy(nccl=text), "host.nccl_conf")
    assert fine.severity is OK
    assert "NCCL_DEBUG=WARN (/etc/nccl.conf)" in fine.observed
    assert "NCCL_SOCKET_IFNAME==bond0 (session)" in fine.observed
    for line in ("system NCCL_P2P_DISABLE=1", "user NCCL_IB_DISABLE=1", "session NCCL_DEBUG=TRACE"):
        assert verdict(healthy(nccl=f"{line}\nend"), "host.nccl_conf") is WARN
    assert verdict(healthy(nccl="system NCCL_P2P_DISABLE=0\nend"), "host.nccl_conf") is OK


def test_an_unreadable_nccl_file_is_not_an_absent_one() -> None:
    assert verdict(healthy(nccl="unreadable system\nabsent user\nend"), "host.nccl_conf") is UNKNOWN


@pytest.mark.parametrize(
    ("version", "expected"), [("18.09.9", FAIL), ("19.03.0", OK), ("28.2.2", OK), ("master-dockerproject", UNKNOWN)]
)
def test_docker_version_threshold(version: str, expected: Verdict) -> None:
    assert verdict(edited("docker", "26.1.3", version), "host.docker") is expected


@pytest.mark.parametrize(
    ("code", "output", "expected", "words"),
    [
        (127, "", FAIL, "not installed"),
        (1, "permission denied while trying to connect to the Docker daemon socket", FAIL, "may not use"),
        (1, "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", FAIL, "does not answer"),
        (125, 'template: :1:2: executing "" at <.ServerVersion>: no such field', UNKNOWN, "exit code 125"),
        (0, 'ServerVersion ""\nCannot connect to the Docker daemon.', FAIL, "does not answer"),
    ],
)
def test_an_engine_that_does_not_answer(code: int, output: str, expected: Verdict, words: str) -> None:
    probe = ended("host.docker", code, output)
    (finding,) = findings(probe, "host.docker")
    assert finding.severity is expected
    assert words in finding.observed
    assert verdict(probe, "host.docker_gpu") is UNKNOWN
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


def test_a_registered_nvidia_runtime_is_a_way_too() -> None:
    probe = edited("docker", "hook nvidia-container-runtime-hook\n", "")
    assert verdict(probe, "host.docker_gpu") is OK


def test_an_image_that_is_not_there_is_not_an_engine_that_fails() -> None:
    absent = ended("host.image", 1, "[]\nError response from daemon: No such image: burst:cuda")
    assert verdict(absent, "host.image") is WARN
    assert verdict(ended("host.image", 1, "Cannot connect to the Docker daemon"), "host.image") is UNKNOWN
    assert verdict(healthy(image="unset"), "host.image") is UNKNOWN
    no_image = ClusterConfig(container=ContainerConfig(runtime="docker"))
    assert verdict(healthy(image="unset"), "host.image", no_image) is SKIP


def test_the_identity_of_an_image_is_what_it_is_made_of() -> None:
    identity = GROUP.traits(healthy(), ClusterConfig())["host.image"]
    assert GROUP.traits(edited("image", "size 19327352832", "size 1"), ClusterConfig())["host.image"] == identity
    for old, new in (("sha256:bb", "sha256:cc"), ("amd64", "arm64"), ("10:00:00", "10:00:01"), ("linux", "freebsd")):
        assert GROUP.traits(edited("image", old, new), ClusterConfig())["host.image"] != identity


@pytest.mark.parametrize("text", ['image "amd64" "linux" "x" []\nsize 1', 'image "amd64"\nsize 1', "image {\nsize 1"])
def test_half_a_description_of_an_image_is_none(text: str) -> None:
    assert verdict(healthy(image=text), "host.image") is UNKNOWN


def test_the_shared_folder_as_the_node_sees_it() -> None:
    stale = "ls: cannot access '/mnt/shared': Stale file handle\nabsent"
    (finding,) = findings(healthy(shared=stale), "host.shared")
    assert finding.severity is FAIL
    assert "Stale file handle" in finding.evidence
    assert verdict(ended("host.shared", 1, "stat: cannot read file system information"), "host.shared") is FAIL
    assert verdict(ended("host.shared", 127), "host.shared") is UNKNOWN
    assert verdict(healthy(shared="unset"), "host.shared") is UNKNOWN
    assert verdict(healthy(shared="unset"), "host.shared", BARE) is SKIP


def test_a_file_server_that_hangs_fails_the_node() -> None:
    probe = damaged(Section("host.shared", "", None, SectionState.TIMED_OUT))
    assert verdict(probe, "host.shared") is FAIL
    cut = damaged(Section("host.shared", "", None, SectionState.CUT_OFF))
    assert verdict(cut, "host.shared") is UNKNOWN


def test_traits_leave_out_what_the_image_brings() -> None:
    told = GROUP.traits(healthy(), ClusterConfig())
    assert {"host.docker", "host.image", "host.nccl_conf"} == set(told)
    bare = GROUP.traits(healthy(software=BARE_SOFTWARE), ClusterConfig())
    assert (bare["host.python"], bare["host.torch"], bare["host.nccl"]) == ("3.11.9", "2.9.1+cu128", "2.27.5")


def test_the_probe_is_told_what_it_must_know() -> None:
    assert GROUP.probe_settings(DOCKER) == {
        "BURST_RUNTIME": "docker",
        "BURST_ENGINE": "docker",
        "BURST_IMAGE": "burst:cuda",
        "BURST_SHARED_FOLDER": "/mnt/shared",
    }
    assert "BURST_IMAGE" not in GROUP.probe_settings(BARE)


def test_numbers_that_are_none_are_refused() -> None:
    for text in ("memlock lots\nnofile_soft 1\nnofile_hard 1", "memlock -1\nnofile_soft 1\nnofile_hard 1", ""):
        assert verdict(healthy(limits=text), "host.memlock") is UNKNOWN
    twice = edited("limits", "memlock unlimited", "memlock unlimited\nmemlock 8")
    assert "more than one" in findings(twice, "host.memlock")[0].observed
