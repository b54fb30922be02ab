"""`burst hosts list` shows the whole way to a node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from paramiko import ECDSAKey

from burst_cli.app import main


def test_the_way_begins_with_what_openssh_begins_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("OpenSSH's client is not installed")  # where CI is set, a skip fails the session
    config = tmp_path / "config"
    config.write_text("Host *\n  User me\nHost n1\n  ProxyJump gate\nHost gate n2\n  ProxyCommand nc %h %p\n")
    argv = ("hosts", "list", "--hosts", "n[1-3]", f"cluster.ssh.config_file={config}")
    assert main([*argv, "--json"]) == 0
    ways = [(row["proxy_command"], row["jump"]) for row in json.loads(capsys.readouterr().out)["hosts"]]
    assert ways == [("nc gate 22", ["me@gate:22"]), ("nc n2 22", []), (None, [])]
    assert main(argv) == 0
    assert "nc gate 22, me@gate:22" in capsys.readouterr().out


def test_an_authority_counts_as_a_known_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("OpenSSH's client is not installed")  # where CI is set, a skip fails the session
    key = ECDSAKey.generate()
    (tmp_path / "known_hosts").write_text(f"@cert-authority *.lab {key.get_name()} {key.get_base64()}\n")
    (tmp_path / "config").write_text(f"Host *\n  HostName %h.lab\n  UserKnownHostsFile {tmp_path}/known_hosts\n")
    argv = ("hosts", "list", "--hosts", "n1", f"cluster.ssh.config_file={tmp_path}/config")
    assert main([*argv, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["hosts"]
    assert [key["type"] for key in row["keys"]] == ["@cert-authority ecdsa-sha2-nistp256"]
    assert main(argv) == 0
    assert "without a known host key" not in capsys.readouterr().out
