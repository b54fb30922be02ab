"""`burst hosts list` shows the whole way to a node."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from paramiko import ECDSAKey
from testkit.command_line import Burst


def test_the_way_begins_with_what_openssh_begins_with(tmp_path: Path, burst: Burst) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("OpenSSH's client is not installed")  # where CI is set, a skip fails the session
    config = tmp_path / "config"
    config.write_text("Host *\n  User me\nHost n1\n  ProxyJump gate\nHost gate n2\n  ProxyCommand nc %h %p\n")
    argv = ("hosts", "list", "--hosts", "n[1-3]", f"cluster.ssh.config_file={config}")
    ways = [(row["proxy_command"], row["jump"]) for row in burst(*argv, "--json").document["hosts"]]
    assert ways == [("nc gate 22", ["me@gate:22"]), ("nc n2 22", []), (None, [])]
    assert "nc gate 22, me@gate:22" in burst(*argv).out


def test_an_authority_counts_as_a_known_key(tmp_path: Path, burst: Burst) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("OpenSSH's client is not installed")  # where CI is set, a skip fails the session
    key = ECDSAKey.generate()
    (tmp_path / "known_hosts").write_text(f"@cert-authority *.lab {key.get_name()} {key.get_base64()}\n")
    (tmp_path / "config").write_text(f"Host *\n  HostName %h.lab\n  UserKnownHostsFile {tmp_path}/known_hosts\n")
    argv = ("hosts", "list", "--hosts", "n1", f"cluster.ssh.config_file={tmp_path}/config")
    (row,) = burst(*argv, "--json").document["hosts"]
    assert [key["type"] for key in row["keys"]] == ["@cert-authority ecdsa-sha2-nistp256"]
    shown = burst(*argv)
    assert (shown.code, "without a known host key" in shown.out) == (0, False)
