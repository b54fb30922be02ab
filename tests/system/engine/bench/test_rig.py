"""The rehearsal network as a value, its refusals, and its throughput probe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from testkit import ROOT

from benchmarks.rig.network import PREFIX, RAIL_INTERFACE, Rig, namespace


def test_only_rails_are_shaped() -> None:
    lines = [line for line in Rig(nodes=2, local_ranks=3, rate_mbit=50).commands() if line[0] == "tc"]
    rates = {(line[2], line[6]): line[line.index("rate") + 1] for line in lines}  # by namespace and interface
    sent = {(namespace(rank), RAIL_INTERFACE) for rank in range(6)}
    received = {(f"{PREFIX}sw", f"r{rank}") for rank in range(6)}
    assert set(rates) == sent | received
    assert set(rates.values()) == {"50mbit"}


def test_missing_tools_are_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.rig", "up"]
    environment = os.environ | {"PATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=200)
    assert result.returncode == 2
    assert "missing here: ip, tc" in result.stderr


def test_probe_measures_what_it_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    probe = [sys.executable, str(ROOT / "benchmarks/rig/probe.py")]
    with subprocess.Popen([*probe, "receive", "127.0.0.1", port], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run([*probe, "send", "127.0.0.1", port, "0.2"], check=True, timeout=200)
        assert float(receiver.stdout.readline()) > 1
