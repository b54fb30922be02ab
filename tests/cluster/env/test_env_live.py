"""What the real probe script reads on this machine: what is set there now, and how that differs from the plan; facts of
rehearsal hardware."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from env_hardware import furnish, probe
from testkit.check_fakes import changed_section, ended

from cluster.env.live import LIVE, SESSION, Difference, LiveSource, compare_live, read_live
from cluster.env.plan import EnvironmentVariable, NodeEnvironment, check_network
from cluster.errors import ClusterError
from cluster.survey.facts import NodeFacts
from cluster.survey.network import Carriers
from cluster.survey.section import NodeProbe, Section, SectionState
from engine.config.cluster import ClusterConfig

CANARY = "s3cret-canary-4711"
RUN = "20260101-000000-abcdef"
WHOLE = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_3:1", "OMP_NUM_THREADS": "8"}
PLAN = NodeEnvironment("node1", tuple(EnvironmentVariable(name, value, "why") for name, value in WHOLE.items()))


def differences(*live: LiveSource) -> set[tuple[str, str, str]]:
    return {(one.place, one.name, one.kind) for one in compare_live(PLAN, live)}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node whose session, files and processes a test may fill."""
    return furnish(tmp_path, monkeypatch, "none")


def live() -> dict[str, LiveSource]:
    """By place; without the ranks of runs that others may have on this machine."""
    sources = read_live(probe("env_live"))
    return {source.place: source for source in sources if not source.is_process or RUN in source.place}


def test_the_login_and_the_files_that_nccl_reads_are_compared(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NCCL_SOCKET_IFNAME", "=eth0"), ("NCCL_IB_HCA", "mlx5"), ("NCCL_NET_PLUGIN", "tcp")):
        monkeypatch.setenv(name, value)
    (root / "etc/nccl.conf").write_text("# by the vendor\nNCCL_IB_HCA==mlx5_0:1,mlx5_3:1\nNCCL_IB_TIMEOUT=22\n")
    (root.parent / "home/.nccl.conf").write_text("NCCL_SOCKET_IFNAME=eno1\n")
    of_all = (
        Difference(SESSION, "NCCL_IB_HCA", "=mlx5_0:1,mlx5_3:1", "mlx5"),
        Difference(SESSION, "NCCL_NET_PLUGIN", None, "tcp"),
        Difference("/etc/nccl.conf", "NCCL_IB_TIMEOUT", None, "22"),
    )
    assert compare_live(PLAN, live().values()) == (
        *of_all,
        Difference("~/.nccl.conf", "NCCL_SOCKET_IFNAME", "=eth0", "eno1"),
    )
    (root / "my.conf").write_text("NCCL_DEBUG=TRACE\n")
    monkeypatch.setenv("NCCL_CONF_FILE", mine := str(root / "my.conf"))
    assert compare_live(PLAN, live().values()) == (*of_all, Difference(mine, "NCCL_DEBUG", None, "TRACE"))


def test_a_file_that_cannot_be_read_is_not_as_planned(root: Path) -> None:
    (root / "etc/nccl.conf").mkdir()
    with pytest.raises(ClusterError, match=r"cannot see all that is set: .*Is a directory: '.*/etc/nccl\.conf'"):
        live()


def answered(**told: object) -> NodeProbe:
    """The answer of a node that was looked at everywhere: `login`, `files`, `ranks`."""
    return NodeProbe(
        "node1", {LIVE.name: ended(LIVE.name, json.dumps({"login": {}, "files": {}, "ranks": [], **told}))}
    )


def test_a_node_that_could_not_be_looked_at_is_an_error() -> None:
    late = NodeProbe("node1", {LIVE.name: Section(LIVE.name, "", None, SectionState.TIMED_OUT)})
    for told, words in (
        (late, "env_live: timed out$"),
        (answered(ranks=[["7", "a", 0, {}]]), "not what was asked for"),
    ):
        with pytest.raises(ClusterError, match=f"node1: cannot see all that is set: .*{words}"):
            read_live(told)


OF_RANK = {"BURST_RUN_ID": RUN, "RANK": "3", "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0:1"}


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like rank 3 of a run, with one variable of the plan, one other, and a secret."""
    given = getattr(request, "param", OF_RANK | {"NCCL_P2P_DISABLE": "1", "API_TOKEN": CANARY})
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | given, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate(b"\n")


def test_a_running_rank_lacks_and_differs_and_a_secret_never_leaves_the_node(
    root: Path, rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("MY_NCCL_TOKEN", CANARY)
    monkeypatch.setenv("HARMLESS", f"x\nset\tNCCL_DEBUG={CANARY}\nNCCL_DEBUG={CANARY}")
    (root / "etc/nccl.conf").write_text(f"TOKEN={CANARY}\n#NCCL_X={CANARY}\nNCCL_DEBUG=INFO\n")
    answer = probe("env_live")
    told = json.loads(answer.section(LIVE.name).output)
    assert told["files"] == {"/etc/nccl.conf": {"NCCL_DEBUG": "INFO"}}
    assert not [name for name, section in answer.sections.items() if CANARY in section.output]
    place = f"rank 3 of run {RUN} (process {rank.pid})"
    assert differences(*(source for source in read_live(answer) if source.place == place)) == {
        (place, "NCCL_IB_HCA", "differs"),
        (place, "NCCL_P2P_DISABLE", "unknown"),
        (place, "OMP_NUM_THREADS", "missing"),
    }


@pytest.mark.parametrize("rank", [{"BURST_RUN_ID": RUN, "NCCL_P2P_DISABLE": "1"}], indirect=True)
def test_launchers_and_supervisors_are_no_ranks(root: Path, rank: subprocess.Popen[bytes]) -> None:
    assert not [place for place in live() if str(rank.pid) in place]


def test_other_names_are_thrown_away_even_if_a_node_sends_them_and_values_are_cleaned() -> None:
    odd = {"TOKEN": CANARY, "NCCL_A B": CANARY}
    login, ranks = {**odd, "NCCL_DEBUG": "\x1b[2J" + "A" * 10_000}, [["7", "x\n", "0\n", odd]]
    assert read_live(answered(login=login, files={"/a\n": odd}, ranks=ranks)) == (
        LiveSource(SESSION, {"NCCL_DEBUG": "A" * 4096 + "…"}),
        LiveSource("/a", {}),
        LiveSource("rank 0 of run x (process 7)", {}, is_process=True),
    )


DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/runs/a/logs/nccl.log"}


@pytest.mark.parametrize(
    ("values", "is_process", "unknown"),
    [
        ({"TORCH_LOGS": "+dynamo", "NCCL_CONF_FILE": "/x", "NCCL_VERSION": "2.27"}, False, []),  # others use them
        ({"GLOO_SOCKET_IFNAME": "eth1"}, False, ["GLOO_SOCKET_IFNAME"]),
        (DEBUG, False, DEBUG),
        (DEBUG | WHOLE, True, []),  # a rank has the debug files of its run
        (WHOLE | {"NCCL_DEBUG_X": "1"}, True, ["NCCL_DEBUG_X"]),
    ],
)
def test_what_matters_of_what_is_set(values: dict[str, str], is_process: bool, unknown: list[str]) -> None:
    assert differences(LiveSource("here", values, is_process)) == {("here", name, "unknown") for name in unknown}


# --- what there is ----------------------------------------------------------------------------------------------------

CONFIG = ClusterConfig()


def facts_of(probe: NodeProbe) -> NodeFacts:
    facts = NodeFacts(probe, CONFIG)
    check_network(facts)
    return facts


def late(base: NodeProbe, name: str) -> NodeProbe:
    return changed_section(base, name, output="", exit_code=None, state=SectionState.TIMED_OUT)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> NodeProbe:
    """What a healthy h100x8 answers to everything."""
    with pytest.MonkeyPatch.context() as patch:
        furnish(tmp_path_factory.mktemp("h100"), patch, "h100x8")
        return probe()


@pytest.mark.parametrize("name", ["ib.ports", "net.links"])
def test_what_cannot_be_read_is_no_machine_without_infiniband(answer: NodeProbe, name: str) -> None:
    words = f"cannot tell what network it has: {name}: timed out. Look at it with `burst check-nodes --only ib,net "
    with pytest.raises(ClusterError, match=words):
        facts_of(late(answer, name))


UNTOLD = "ports that lead to storage servers are not known: env.carriers: timed out"


def test_what_else_cannot_be_read_is_not_known(answer: NodeProbe) -> None:
    def told(facts: NodeFacts) -> list[Any]:
        return [facts.adapters, facts.network, facts.interface, facts.gpu_addresses, facts.carriers, facts.reaches_gpus]

    *others, carriers, works = told(facts_of(answer))
    assert (carriers.trouble, works) == ("", True)
    assert told(facts_of(late(answer, "env.carriers"))) == [*others, Carriers(trouble=UNTOLD), works]
    assert told(facts_of(late(answer, "ib.gpudirect"))) == [*others, carriers, None]


@pytest.mark.needs("ip")
def test_mounts_and_cores_are_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: NodeProbe
) -> None:
    root = furnish(tmp_path, monkeypatch, "h100x8")
    (root / "proc" / "mounts").write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        "nas:/export /my\\040data nfs4 rw,vers=4.2,clientaddr=192.0.2.2,local_lock=none,addr=198.51.100.7 0 0\n"
        "198.51.100.9@tcp:/lustre /scratch lustre rw 0 0\n"
        "//198.51.100.11/share /win cifs rw 0 0\n"
        "bad$(touch\\040/tmp/x):/e /odd nfs rw 0 0\n"
        "127.0.0.1:/e /own nfs rw 0 0\n"
        "198.51.100.12:/e /volume fuse.glusterfs rw 0 0\n"
    )
    facts = facts_of(replace(answer, sections={**answer.sections, **probe("env").sections}))
    assert facts.interface.interface is not None
    places = {"/my data": "7", "/scratch": "9", "/win": "11", "/volume": "12"}
    told = [(folder, f"198.51.100.{last}", facts.interface.interface.name) for folder, last in places.items()]
    assert [(one.mount_point, one.server, one.interface) for one in facts.carriers.storage] == told
    assert facts.carriers.cores == len(os.sched_getaffinity(0))
