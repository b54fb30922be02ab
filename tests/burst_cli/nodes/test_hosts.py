"""`burst hosts` and the choice of nodes that all cluster verbs share, against simulated servers."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from paramiko import ECDSAKey
from testkit import ROOT
from testkit.command_line import Burst
from testkit.fleet import Fleet, start_fleet

from burst_cli.options import NodeOptions
from cluster.errors import HostsError
from cluster.ssh.hosts import trust_file

pytestmark = pytest.mark.needs("ssh")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    modes: dict[str, Any] = {f"n{number}": "unknown_key" for number in (1, 2, 3)}
    modes |= {"known": "ok", "changed": "wrong_key", "down": "refuse", "behind": "unknown_key"}
    with start_fleet(tmp_path_factory.mktemp("fleet"), modes, jumps={"behind": "n1"}) as fleet:
        yield fleet


@pytest.fixture
def hosts(burst: Burst, fleet: Fleet) -> Burst:
    """`burst hosts VERB --hosts NODES ...` on the fleet."""
    ssh = (f"cluster.ssh.config_file={fleet.config_file}", "cluster.ssh.connect_timeout_s=5")
    return lambda verb, nodes, *argv: burst("hosts", verb, "--hosts", nodes, *ssh, *argv)


def test_the_first_list_that_is_given_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "s[1-2]")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("f1\n")
    found = [
        NodeOptions(hosts="h1").select(),
        NodeOptions(["cluster.nodes=c1"], hostfile=hostfile).select(),
        NodeOptions(["cluster.nodes='c[1-2]'"]).select(),
        NodeOptions().select(),
    ]
    assert [[host.name for host in targets.hosts] for targets in found] == [["h1"], ["f1"], ["c1", "c2"], ["s1", "s2"]]
    sources = ["--hosts", f"hostfile {hostfile}", "cluster.nodes", "Slurm (SLURM_JOB_NODELIST)"]
    assert [targets.source for targets in found] == sources
    monkeypatch.setenv("SLURM_JOB_NODELIST", "s[1-")  # is not read where nodes are named
    for or_here in (False, True):
        (host,) = NodeOptions(hosts="h1").select(or_here=or_here).hosts
        assert host.name == "h1"
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    with pytest.raises(HostsError, match="one of them"):
        NodeOptions(hosts="a", hostfile=hostfile).select()
    with pytest.raises(HostsError, match="no nodes are named"):
        NodeOptions().select()


def test_list_shows_routes_with_known_keys(hosts: Burst, fleet: Fleet) -> None:
    code, out, _ = hosts("list", "known,behind")
    document = hosts("list", "known,behind", "--json").document
    key = document["hosts"][1]["keys"][0]["fingerprint"]
    through = f"tester@127.77.0.1:{fleet.ports['n1']}"

    def way(name: str, address: str, jump: list[str], keys: list[dict[str, str]]) -> dict[str, Any]:
        port = fleet.ports[name]
        where = {"name": name, "address": address, "port": port, "user": "tester", "key_name": f"[{address}]:{port}"}
        files = [str(fleet.config_file.with_name("id_ed25519"))]
        return {**where, "jump": jump, "proxy_command": None, "identity_files": files, "keys": keys}

    known = {"type": "ssh-ed25519", "fingerprint": key, "file": str(fleet.known_hosts)}
    ways = [way("behind", "127.77.0.7", [through], []), way("known", "127.77.0.4", [], [known])]
    assert document == {"source": "--hosts", "hosts": ways}
    assert [code, *(" ".join(line.split()) for line in out.splitlines())] == [
        0,
        "node address port user through host key known in",
        f"behind 127.77.0.7 {fleet.ports['behind']} tester {through} unknown –",
        f"known 127.77.0.4 {fleet.ports['known']} tester – ssh-ed25519 {key} {fleet.known_hosts}",
        "2 nodes from --hosts; 1 without a known host key: compare and accept with `burst hosts trust`",
    ]


def test_list_follows_the_openssh_configuration(tmp_path, burst) -> None:
    key = ECDSAKey.generate()
    (tmp_path / "known_hosts").write_text(2 * f"@cert-authority *.lab {key.get_name()} {key.get_base64()}\n")
    (tmp_path / "config").write_text(
        "Host *\n  User me\nHost n1\n  ProxyJump gate\nHost gate n2\n  ProxyCommand nc %h %p\n"
        f"Host n3\n  HostName %h.lab\n  UserKnownHostsFile {tmp_path}/known_hosts\n"
    )
    argv = ("hosts", "list", f"cluster.ssh.config_file={tmp_path}/config", "--hosts")
    rows = burst(*argv, "n[1-3]", "--json").document["hosts"]
    ways = [("nc gate 22", ["me@gate:22"]), ("nc n2 22", []), (None, [])]
    assert [(row["proxy_command"], row["jump"]) for row in rows] == ways
    assert "nc gate 22, me@gate:22" in burst(*argv, "n1").out
    assert [key["type"] for key in rows[2]["keys"]] == ["@cert-authority ecdsa-sha2-nistp256"] * 2
    assert re.search(r" and 1 more +\S+\n1 node from --hosts$", burst(*argv, "n3").out)


def test_trust_adds_new_keys_only(hosts: Burst, fleet: Fleet) -> None:
    code, out, err = hosts("trust", "n[1-3],known,changed,down", "--yes")
    lines = [line.split() for line in out.splitlines()]
    assert (code, lines[0]) == (1, ["node", "type", "fingerprint", "state"])
    states = [["changed", "changed"], ["known", "known"], *(["n1", "new"], ["n2", "new"], ["n3", "new"])]
    assert [[line[0], line[-1]] for line in lines[1:]] == [*states, ["3", str(trust_file())]]
    assert [line.split(":")[:2] for line in err.splitlines()] == [["warning", " changed"], ["error", " down"]]
    assert trust_file().read_text().count("\n") == 3
    again = hosts("trust", "n[1-3],known", "--yes", "--json")
    assert (again.code, again.document["file"]) == (0, str(trust_file()))
    assert [host["keys"][0]["state"] for host in again.document["hosts"]] == ["known"] * 4
    partly = hosts("trust", "n1,down", "--yes", "--json")
    down, n1 = partly.document["hosts"]
    assert (partly.code, partly.err) == (1, f"error: {down['error']}\n")
    assert down.items() >= {"name": "down", "trusted": False, "keys": []}.items()
    key = {"type": "ssh-ed25519", "state": "known", "fingerprint": n1["keys"][0]["fingerprint"]}
    name = f"[127.77.0.1]:{fleet.ports['n1']}"
    assert n1 == {"name": "n1", "key_name": name, "trusted": True, "keys": [key], "error": None}


def test_the_key_of_a_jump_host_is_trusted_before_what_lies_behind(hosts: Burst) -> None:
    found = hosts("trust", "behind", "--yes", "--json")
    rows = [(host["name"], host["trusted"], host["keys"][0]["state"]) for host in found.document["hosts"]]
    assert (found.code, found.document["source"]) == (0, "--hosts")
    assert rows == [("n1", True, "added"), ("behind", True, "added")]


def test_only_the_given_fingerprint_is_trusted(hosts: Burst) -> None:
    (n1,) = hosts("trust", "n1", "--fingerprint", "SHA256:none", "--json").document["hosts"]
    assert not trust_file().exists()
    code, out, err = hosts("trust", "n[1-2]", "--fingerprint", n1["keys"][0]["fingerprint"])
    assert (code, "1 key added" in out, "n2: shows none of the fingerprints" in err) == (1, True, True)


def test_a_changed_key_is_never_replaced(hosts: Burst) -> None:
    hosts("trust", "n1", "--yes")
    hosts("trust", "n2", "--yes")
    first, second = trust_file().read_text().splitlines()
    swapped = f"{first.split()[0]} {second.split(' ', 1)[1]}\n"
    for text, state in ((swapped, "changed"), (f"@revoked {first}\n", "revoked")):
        trust_file().write_text(text)
        code, out, err = hosts("trust", "n1", "--yes")
        assert (code, out.split()[-1], err[:9], "burst hosts forget" in err) == (1, state, "warning: ", True)
        assert trust_file().read_text() == text


def test_forget_removes_trusted_keys_only(hosts: Burst, fleet: Fleet) -> None:
    hosts("trust", "n[1-2]", "--yes")
    found = hosts("forget", "n1,known", "--json")
    known = {"name": "known", "forgotten": 0, "still_known_in": [str(fleet.known_hosts)]}
    gone = {"name": "n1", "forgotten": 1, "still_known_in": []}
    assert (found.code, found.document) == (0, {"file": str(trust_file()), "hosts": [known, gone]})
    assert trust_file().read_text().count("\n") == 1
    name = f"[127.77.0.4]:{fleet.ports['known']}"
    assert hosts("forget", "n[1-2],known").out.splitlines() == [
        f"known: was not remembered; still known in {fleet.known_hosts}: ssh-keygen -R '{name}' -f {fleet.known_hosts}",
        "n1: was not remembered",
        "n2: 1 key forgotten",
    ]


def test_mistakes_in_trusting_are_usage_errors(hosts: Burst) -> None:
    told = [([], "nobody can be asked"), (["--fingerprint", "MD5:x"], "SHA256")]
    for argv, words in (*told, (["--yes", "--fingerprint", "SHA256:x"], "one of them")):
        code, _, err = hosts("trust", "n1", *argv)
        assert (code, words in err) == (2, True)


@pytest.mark.parametrize(("answer", "code", "added"), [("y\n", 0, 1), ("n\n", 1, 0), ("\x03", 130, 0)])
def test_a_person_is_asked_once(fleet: Fleet, answer: str, code: int, added: int) -> None:
    command = [sys.executable, "-m", "burst_cli", "hosts", "trust", "--hosts", "n1"]
    command.append(f"cluster.ssh.config_file={fleet.config_file}")
    primary, secondary = pty.openpty()
    terminal = ["setsid", "--ctty", "--wait"]
    streams = {"stdin": secondary, "stdout": subprocess.PIPE, "stderr": secondary}
    process = subprocess.Popen([*terminal, *command], cwd=ROOT, **streams)  # type: ignore[call-overload]
    os.close(secondary)
    try:
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(primary, 4096)
        assert b"Trust this host from now on?" in shown
        _wait_until_asleep(process.pid)
        os.write(primary, answer.encode())
        out = process.communicate(timeout=200)[0]
    finally:
        process.kill()
    os.close(primary)
    assert (process.returncode, b"SHA256:" in out, trust_file().exists()) == (code, True, bool(added))


def _wait_until_asleep(pid: int) -> None:
    """Until the process waits for an answer. A Ctrl-C between its question and its read would be lost on Python."""
    process, asleep, deadline = psutil.Process(pid), 0, time.monotonic() + 200
    while asleep < 5:
        assert time.monotonic() < deadline, "still busy long after its question"
        time.sleep(0.05)
        asleep = asleep + 1 if process.status() == psutil.STATUS_SLEEPING else 0
