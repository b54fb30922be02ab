"""`burst hosts` and the choice of nodes that all cluster verbs share, against simulated servers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from testkit import ROOT
from testkit.command_line import Burst
from testkit.fleet import Fleet, start_fleet

from burst_cli.targets import select_targets
from cluster.errors import HostsError
from cluster.ssh.keys import trust_file


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    modes: dict[str, Any] = {f"n{number}": "unknown_key" for number in (1, 2, 3)}
    modes |= {"known": "ok", "changed": "wrong_key", "down": "refuse", "behind": "unknown_key"}
    with start_fleet(tmp_path_factory.mktemp("fleet"), modes, jumps={"behind": "n1"}) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def clean_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("COLUMNS", "320")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


@pytest.fixture
def burst(burst: Burst, fleet: Fleet) -> Burst:
    """`burst hosts WORD ...` on the fleet."""
    ssh = (f"cluster.ssh.config_file={fleet.config_file}", "cluster.ssh.connect_timeout_s=5")
    return lambda word, *argv: burst("hosts", word, *ssh, *argv)


def fingerprint_of(burst: Burst, name: str) -> str:
    _, out, _ = burst("trust", "--hosts", name, "--fingerprint", "SHA256:none", "--json")
    return str(json.loads(out)["hosts"][0]["keys"][0]["fingerprint"])


def test_the_first_list_that_is_given_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "s[1-2]")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("f1\n")
    found = [
        select_targets([], [], hosts="h1", hostfile=None),
        select_targets(["cluster.nodes=c1"], [], hosts=None, hostfile=hostfile),
        select_targets(["cluster.nodes='c[1-2]'"], [], hosts=None, hostfile=None),
        select_targets([], [], hosts=None, hostfile=None),
    ]
    assert [[host.name for host in targets.hosts] for targets in found] == [["h1"], ["f1"], ["c1", "c2"], ["s1", "s2"]]
    sources = ["--hosts", f"hostfile {hostfile}", "cluster.nodes", "Slurm (SLURM_JOB_NODELIST)"]
    assert [targets.source for targets in found] == sources
    monkeypatch.setenv("SLURM_JOB_NODELIST", "s[1-")  # is not read where nodes are named
    for or_here in (False, True):
        (host,) = select_targets([], [], hosts="h1", hostfile=None, or_here=or_here).hosts
        assert host.name == "h1"


def test_two_lists_or_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="one of them"):
        select_targets([], [], hosts="a", hostfile=tmp_path / "x")
    with pytest.raises(HostsError, match="no nodes are named"):
        select_targets([], [], hosts=None, hostfile=None)


def test_list_shows_each_way_and_which_keys_are_known(burst: Burst, fleet: Fleet) -> None:
    code, out, _ = burst("list", "--hosts", "known,behind", "--json")
    document = json.loads(out)
    key = document["hosts"][1]["keys"][0]["fingerprint"]
    through = f"tester@127.77.0.1:{fleet.ports['n1']}"

    def way(name: str, address: str, jump: list[str], keys: list[dict[str, str]]) -> dict[str, Any]:
        port = fleet.ports[name]
        where = {"name": name, "address": address, "port": port, "user": "tester", "key_name": f"[{address}]:{port}"}
        files = [str(fleet.config_file.with_name("id_ed25519"))]
        return {**where, "jump": jump, "proxy_command": None, "identity_files": files, "keys": keys}

    known = {"type": "ssh-ed25519", "fingerprint": key, "file": str(fleet.known_hosts)}
    ways = [way("behind", "127.77.0.7", [through], []), way("known", "127.77.0.4", [], [known])]
    assert (code, document) == (0, {"source": "--hosts", "hosts": ways})
    code, out, _ = burst("list", "--hosts", "known,behind")
    assert (code, [" ".join(line.split()) for line in out.splitlines()]) == (
        0,
        [
            "node address port user through host key known in",
            f"behind 127.77.0.7 {fleet.ports['behind']} tester {through} unknown –",
            f"known 127.77.0.4 {fleet.ports['known']} tester – ssh-ed25519 {key} {fleet.known_hosts}",
            "2 nodes from --hosts; 1 without a known host key: compare and accept with `burst hosts trust`",
        ],
    )


def test_trust_adds_what_is_new_and_names_what_is_not(burst: Burst, fleet: Fleet) -> None:
    code, out, err = burst("trust", "--hosts", "n[1-3],known,changed,down", "--yes")
    assert code == 1
    assert "3 keys added" in out
    assert "down:" in err
    assert "changed: shows a key that contradicts" in err
    assert trust_file().read_text().count("\n") == 3
    code, out, _ = burst("trust", "--hosts", "n[1-3],known", "--yes", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["file"] == str(trust_file())
    assert [host["keys"][0]["state"] for host in document["hosts"]] == ["known"] * 4
    code, out, err = burst("trust", "--hosts", "n1,down", "--yes", "--json")
    down, n1 = json.loads(out)["hosts"]
    assert (code, err) == (1, f"error: {down['error']}\n")
    assert down.items() >= {"name": "down", "trusted": False, "keys": []}.items()
    key = {"type": "ssh-ed25519", "state": "known", "fingerprint": n1["keys"][0]["fingerprint"]}
    name = f"[127.77.0.1]:{fleet.ports['n1']}"
    assert n1 == {"name": "n1", "key_name": name, "trusted": True, "keys": [key], "error": None}


def test_the_key_of_a_jump_host_is_trusted_before_what_lies_behind(burst: Burst) -> None:
    code, out, _ = burst("trust", "--hosts", "behind", "--yes", "--json")
    assert code == 0
    assert [(host["name"], host["trusted"]) for host in json.loads(out)["hosts"]] == [("n1", True), ("behind", True)]


def test_only_the_given_fingerprint_is_trusted(burst: Burst) -> None:
    fingerprint = fingerprint_of(burst, "n1")
    assert not trust_file().exists()
    code, out, err = burst("trust", "--hosts", "n[1-2]", "--fingerprint", fingerprint)
    assert code == 1
    assert "1 key added" in out
    assert "n2: shows none of the fingerprints" in err


def test_a_changed_key_in_the_store_is_not_replaced(burst: Burst, fleet: Fleet) -> None:
    burst("trust", "--hosts", "n[1-2]", "--yes")
    first, second = trust_file().read_text().splitlines()
    swapped = f"{first.split()[0]} {second.split(' ', 1)[1]}\n"
    trust_file().write_text(swapped)
    code, out, err = burst("trust", "--hosts", "n1", "--yes")
    assert code == 1
    assert "changed" in out
    assert "burst hosts forget" in err
    assert trust_file().read_text() == swapped


def test_forget_takes_back_and_tells_what_it_cannot(burst: Burst, fleet: Fleet) -> None:
    burst("trust", "--hosts", "n[1-2]", "--yes")
    code, out, _ = burst("forget", "--hosts", "n1,known", "--json")
    known = {"name": "known", "forgotten": 0, "still_known_in": [str(fleet.known_hosts)]}
    gone = {"name": "n1", "forgotten": 1, "still_known_in": []}
    assert (code, json.loads(out)) == (0, {"file": str(trust_file()), "hosts": [known, gone]})
    assert trust_file().read_text().count("\n") == 1
    code, out, _ = burst("forget", "--hosts", "n[1-2],known")
    name = f"[127.77.0.4]:{fleet.ports['known']}"
    assert out.splitlines() == [
        f"known: was not remembered; still known in {fleet.known_hosts}: ssh-keygen -R '{name}' -f {fleet.known_hosts}",
        "n1: was not remembered",
        "n2: 1 key forgotten",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--hosts", "n1"], "nobody can be asked"),
        (["--hosts", "n1", "--yes", "--fingerprint", "SHA256:x"], "one of them"),
        (["--hosts", "n1", "--fingerprint", "MD5:x"], "SHA256"),
    ],
)
def test_mistakes_are_usage_errors(burst: Burst, argv: list[str], words: str) -> None:
    code, _, err = burst("trust", *argv)
    assert code == 2
    assert words in err


@pytest.mark.parametrize(("answer", "code", "added"), [("y\n", 0, 1), ("n\n", 1, 0), ("\x03", 130, 0)])
def test_a_person_is_asked_once(fleet: Fleet, answer: str, code: int, added: int) -> None:
    command = [sys.executable, "-m", "burst_cli", "hosts", "trust", "--hosts", "n1"]
    command.append(f"cluster.ssh.config_file={fleet.config_file}")
    primary, secondary = pty.openpty()
    terminal = ["setsid", "--ctty", "--wait"]
    process = subprocess.Popen([*terminal, *command], cwd=ROOT, stdin=secondary, stdout=secondary, stderr=secondary)
    os.close(secondary)
    try:
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(primary, 4096)
        assert b"SHA256:" in shown
        _wait_until_asleep(process.pid)
        os.write(primary, answer.encode())
        assert process.wait(200) == code
    finally:
        process.kill()
    os.close(primary)
    assert trust_file().exists() == bool(added)


def _wait_until_asleep(pid: int) -> None:
    """Until the process waits for an answer. A Ctrl-C between its question and its read would be lost on Python."""
    process, asleep, deadline = psutil.Process(pid), 0, time.monotonic() + 200
    while asleep < 5:
        assert time.monotonic() < deadline, "still busy long after its question"
        time.sleep(0.05)
        asleep = asleep + 1 if process.status() == psutil.STATUS_SLEEPING else 0
