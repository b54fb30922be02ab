"""NCCL's logs in a run folder against the plan: who ran on sockets where the plan names RDMA ports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from testkit.command_line import Burst
from testkit.run_maker import make_run, plan_adapters

from burst_cli.launch.launching import conclude
from burst_cli.runs.nccl_network import socket_fallbacks
from cluster.control.link import LaunchOutcome
from engine.runs.folder import RunFolder

HEAD = "gpu-a:4711:4790 [0] NCCL INFO "
VERBS = f"{HEAD}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>\n{HEAD}Using network IB\n"
SOCKETS = f"{HEAD}NET/IB : No device found.\n{HEAD}NET/Socket : Using [0]eth0:10.0.0.1<0>\n"
NETWORK = f"{HEAD}Using network Socket\n"
CHANNEL = f"{HEAD}Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n"
TWO = {"tb1": 2, "tb2": 2}


def run_with(folder: Path, nodes: dict[str, int] | None = None, **adapters: str) -> RunFolder:
    made = make_run(folder / "runs", nodes=nodes or TWO, steps=1, state="completed")
    plan_adapters(made, **adapters)
    return made


def write_nccl(run: RunFolder, node: str, text: str, pid: int = 4711) -> Path:
    path = run.log_dir(node) / f"nccl.gpu-a.{pid}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() + b"\xff")
    return path


def test_socket_fallback_is_recognised_in_nccl_logs(tmp_path: Path) -> None:
    sockets = (SOCKETS, NETWORK, CHANNEL, SOCKETS + NETWORK, VERBS + NETWORK)
    others = ("", "garbage \x00\x1b[31m", VERBS, VERBS + f"{HEAD}NET/Socket : Using [0]eth0:1<0>\n")
    for place, said in enumerate((*sockets, *others)):
        run = run_with(tmp_path / str(place))
        write_nccl(run, "tb1", VERBS)
        write_nccl(run, "tb2", VERBS, pid=1)
        write_nccl(run, "tb2", said, pid=2)
        found = [(row["node"], "Socket" in row["said"]) for row in socket_fallbacks(run)]
        assert found == [("tb2", True)] * (said in sockets)


def test_sockets_that_were_planned_or_of_one_node_or_of_an_earlier_attempt_are_none(tmp_path: Path) -> None:
    wanted = run_with(tmp_path / "wanted", NCCL_IB_DISABLE="1")
    alone, again = run_with(tmp_path / "alone", {"tb1": 2}), run_with(tmp_path / "again")
    logs = [write_nccl(run, "tb1", NETWORK) for run in (wanted, alone, again)]
    assert [len(socket_fallbacks(run)) for run in (wanted, alone, again)] == [0, 0, 1]
    os.utime(logs[2], (1e9, 1e9))
    assert socket_fallbacks(again) == []
    write_nccl(again, "tb1", NETWORK, pid=4712)
    assert len(socket_fallbacks(again)) == 1
    for pid in range(5000, 5064):  # of so many processes the last are looked at
        write_nccl(again, "tb1", VERBS, pid=pid)
    assert socket_fallbacks(again) == []


def test_socket_fallback_is_reported(burst: Burst, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path)
    for node in TWO:
        write_nccl(run, node, SOCKETS + NETWORK)
    told, rows = "NCCL fell back to sockets on tb[1-2], though the plan names RDMA ports", []
    assert f"warning: {told}" in " ".join(burst("status").out.split())
    rows.append(burst("status", "--json").document["socket_fallback"])
    for as_json in (False, True):
        conclude(run, LaunchOutcome("completed", 0), 1.0, None, as_json=as_json)
        out, err = capsys.readouterr()
        assert f"warning: {told}" in err
    rows.append(json.loads(out)["socket_fallback"])
    assert rows == [[{"node": node, "said": NETWORK.strip()} for node in TWO]] * 2
