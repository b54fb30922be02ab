"""NCCL's logs in a run folder against the plan: who ran on sockets where the plan names RDMA ports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from testkit.run_maker import make_run, plan_adapters

from burst_cli.launch.launching import conclude
from burst_cli.launch.nccl_network import socket_fallbacks
from cluster.control.link import LaunchOutcome
from engine.runs.folder import RunFolder

HEAD = "gpu-a:4711:4790 [0] NCCL INFO "
VERBS = f"{HEAD}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>\n{HEAD}Using network IB\n"
SOCKETS = f"{HEAD}NET/IB : No device found.\n{HEAD}NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
NETWORK = f"{HEAD}Using network Socket\n"
CHANNEL = f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = make_run(tmp_path / "runs", nodes={"tb1": 2, "tb2": 2}, steps=1, state="completed")
    plan_adapters(made)
    return made


def write_nccl(run: RunFolder, node: str, text: str, pid: int = 4711) -> Path:
    path = run.log_dir(node) / f"nccl.gpu-a.{pid}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("said", [SOCKETS, NETWORK, CHANNEL, SOCKETS + NETWORK, VERBS + NETWORK])
def test_sockets_in_any_of_nccl_s_words_are_a_fallback(run: RunFolder, said: str) -> None:
    write_nccl(run, "tb1", VERBS)
    write_nccl(run, "tb2", VERBS, pid=1)
    write_nccl(run, "tb2", said, pid=2)
    (node, line), *others = socket_fallbacks(run).items()
    assert (node, others) == ("tb2", [])
    assert "Socket" in line


@pytest.mark.parametrize(
    "said", ["", "garbage \x00\x1b[31m", VERBS, VERBS + f"{HEAD}NET/Socket : Using [0]eth0:1<0>\n"]
)
def test_a_log_of_adapters_or_of_nothing_is_none(run: RunFolder, said: str) -> None:
    write_nccl(run, "tb1", said)
    assert socket_fallbacks(run) == {}


def test_sockets_that_the_plan_wants_are_none(run: RunFolder) -> None:
    plan_adapters(run, NCCL_IB_DISABLE="1")
    write_nccl(run, "tb1", NETWORK)
    assert socket_fallbacks(run) == {}


def test_on_one_node_nothing_goes_over_a_network(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    plan_adapters(run)
    write_nccl(run, "tb1", NETWORK)
    assert socket_fallbacks(run) == {}


def test_what_an_earlier_attempt_said_does_not_count(run: RunFolder) -> None:
    os.utime(write_nccl(run, "tb1", NETWORK), (1e9, 1e9))
    assert socket_fallbacks(run) == {}


def test_status_says_it_to_people_and_to_programs(burst, run: RunFolder) -> None:
    for node in ("tb1", "tb2"):
        write_nccl(run, node, SOCKETS + NETWORK)
    out = " ".join(burst("status").out.split())
    assert "warning: NCCL fell back to sockets on tb[1-2], though the plan names RDMA ports" in out
    assert json.loads(burst("status", "--json").out)["socket_fallback"] == [
        {"node": node, "said": NETWORK.strip()} for node in ("tb1", "tb2")
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_launch_that_ends_says_it(run: RunFolder, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    write_nccl(run, "tb1", NETWORK)
    conclude(run, LaunchOutcome("completed", 0), 1.0, None, as_json=as_json)
    out, err = capsys.readouterr()
    assert "warning: NCCL fell back to sockets on tb1" in err
    if as_json:
        assert json.loads(out)["socket_fallback"] == [{"node": "tb1", "said": NETWORK.strip()}]
