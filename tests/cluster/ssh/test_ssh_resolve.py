"""Names become hosts as OpenSSH itself would have it, with the settings of cluster.ssh on top."""

from __future__ import annotations

import os
import pwd
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import HostsError
from cluster.ssh.hosts import Host, resolve_hosts, trust_file
from engine.config.cluster import ClusterConfig, SshConfig

pytestmark = pytest.mark.needs("ssh")


@pytest.fixture(autouse=True)
def own_trust_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


def resolve(tmp_path: Path, config: str, *names: str, **settings: object) -> list[Host]:
    file = tmp_path / "config"
    file.write_text(config)
    ssh = SshConfig(config_file=str(file), **settings)  # type: ignore[arg-type]
    return list(resolve_hosts(names, ClusterConfig(ssh=ssh)))


def test_everything_that_openssh_says_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "more").write_text("Host n*\n  IdentityFile ~/keys/%h_%r_%p\n  IdentitiesOnly yes\n")
    config = f"""
Include {tmp_path}/more
Host n1
  HostName 10.1.2.3
  User trainer
  Port 2222
  ConnectTimeout 4
  UserKnownHostsFile {tmp_path}/a {tmp_path}/b
  GlobalKnownHostsFile none
  IdentityAgent none
  IdentityFile %d/keys/second
  CertificateFile ~/keys/%n-%i-%l-%k-%u-cert.pub
"""
    (host,) = resolve(tmp_path, config, "n1")
    assert (host.name, host.address, host.user, host.port) == ("n1", "10.1.2.3", "trainer", 2222)
    assert host.key_name == "[10.1.2.3]:2222"
    assert host.known_hosts == (str(trust_file()), f"{tmp_path}/a", f"{tmp_path}/b")
    me = pwd.getpwuid(os.getuid())
    assert host.identity_files == tuple(f"{me.pw_dir}/keys/{name}" for name in ("10.1.2.3_trainer_2222", "second"))
    certificate = f"n1-{me.pw_uid}-{os.uname().nodename}-[10.1.2.3]:2222-{me.pw_name}-cert.pub"
    assert host.certificate_files == (f"{me.pw_dir}/keys/{certificate}",)
    assert (host.identities_only, host.agent_socket, host.connect_timeout_s) == (True, "", 4.0)
    assert host.jump is None
    assert resolve(tmp_path, "Host *\n  HostKeyAlias node-one\n  Port 2200\n", "n1")[0].key_name == "node-one"
    monkeypatch.setenv("SSH_AUTH_SOCK", "/agent")
    for line, socket in (("", "/agent"), ("IdentityAgent SSH_AUTH_SOCK", "/agent"), ("IdentityAgent /mine", "/mine")):
        assert resolve(tmp_path, f"Host *\n  {line}\n", "n1")[0].agent_socket == socket


def test_settings_override_openssh(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("private")
    config = "Host *\n  User a\n  Port 2222\n  ProxyJump old\n  ConnectTimeout 4\n"
    settings = {"user": "b", "port": 33, "identity_file": str(key), "jump": "u@gate:44", "known_hosts": "/k"}
    (host,) = resolve(tmp_path, config, "n1", connect_timeout_s=7.0, **settings)
    assert (host.user, host.port, host.identity_files, host.connect_timeout_s) == ("b", 33, (str(key),), 7.0)
    assert host.known_hosts == (str(trust_file()), "/k")
    assert host.jump is not None
    assert (host.jump.name, host.jump.user, host.jump.port) == ("gate", "u", 44)
    assert host.jump.identity_files == (str(key),)


def test_jump_chains_are_followed_from_the_nearest_back(tmp_path: Path) -> None:
    config = (
        "Host n1\n  ProxyJump first@outer:2201,inner\nHost inner\n  HostName 10.9.9.9\nHost outer\n  ProxyJump last\n"
    )
    chain = [(gate.name, gate.address, gate.port) for gate in resolve(tmp_path, config, "n1")[0].way]
    assert chain == [("last", "last", 22), ("outer", "outer", 2201), ("inner", "10.9.9.9", 22)]


def test_a_jump_host_among_the_nodes_is_reached_directly(tmp_path: Path) -> None:
    host, gate = resolve(tmp_path, "", "n1", "gate", jump="gate")
    assert host.jump == replace(gate, overrides=())
    assert gate.jump is None


def test_jump_hosts_that_point_at_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="loop"):
        resolve(tmp_path, "Host *\n  ProxyJump gate\n", "n1")
    with pytest.raises(HostsError, match="jump hosts in a row"):
        resolve(tmp_path, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\nHost n1\n  ProxyJump a\n", "n1")
    config = "".join(f"Host g{k}\n  ProxyJump g{k + 1}\n" for k in range(9))
    assert len(resolve(tmp_path, config, "g1")[0].way) == 8
    with pytest.raises(HostsError, match="more than 8 jump hosts in a row"):
        resolve(tmp_path, config, "g0")


def test_a_proxy_command_is_what_leads_to_the_outermost_host(tmp_path: Path) -> None:
    config = "Host gate\n  ProxyCommand none\nHost *\n  ProxyCommand nc %h %p # %n %r 100%%\n  Port 2200\n"
    (host,) = resolve(tmp_path, config, "n1", user="me")
    assert (host.jump, host.proxy_command) == (None, "nc n1 2200 # n1 me 100%")
    (host,) = resolve(tmp_path, "Host *\n  ProxyCommand nc %r %h\n", "n1", user="DOMAIN\\me$")
    assert host.proxy_command == "nc 'DOMAIN\\me$' n1"  # names are words and no commands
    (behind,) = resolve(tmp_path, "Host gate\n  ProxyCommand nc %h %p\n", "n1", jump="gate")
    assert behind.jump is not None
    assert (behind.proxy_command, behind.jump.proxy_command) == (None, "nc gate 22")
    (through,) = resolve(tmp_path, config, "n1", jump="gate")
    assert through.jump is not None
    assert (through.proxy_command, through.jump.proxy_command) == (None, None)


@pytest.mark.parametrize(
    ("jump", "found"),
    [
        ("ssh://u@h:22", ("h", "u", 22)),
        ("u@[::1]:2200", ("::1", "u", 2200)),
        *((jump, None) for jump in ("-oProxyCommand=x", "a b", "a:0", "a:99999", "$(x)@gate", "u@", "a;b", "-l@gate")),
    ],
)
def test_jump_hosts_come_in_every_spelling_and_what_is_none_is_refused(
    tmp_path: Path, jump: str, found: tuple[str, str, int] | None
) -> None:
    if found is None:
        with pytest.raises(HostsError, match=r"jump host|no host name|invalid characters|[Bb]ad port"):
            resolve(tmp_path, "", "n1", jump=jump)
        return
    gate = resolve(tmp_path, "", "n1", jump=jump)[0].jump
    assert gate is not None
    assert (gate.name, gate.user, gate.port) == found


def test_a_broken_configuration_is_quoted_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="line 2"):
        resolve(tmp_path, "Host *\n  NoSuchOption yes\n", "n1")


@pytest.mark.parametrize("setting", ["config_file", "identity_file"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, setting: str) -> None:
    with pytest.raises(HostsError, match=f"cluster.ssh.{setting}=.*no such file"):
        resolve_hosts(["n1"], ClusterConfig(ssh=SshConfig(**{setting: str(tmp_path / "none")})))


def test_names_never_become_options_of_ssh(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    for name in (f"-oProxyCommand=touch {proof}", f"$(touch {proof})", f"`touch {proof}`"):
        with pytest.raises(HostsError, match="no host name"):
            resolve_hosts(["ok", name], ClusterConfig())
    assert not proof.exists()


def test_without_openssh_nobody_knows_how_a_node_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostsError, match="openssh-client"):
        resolve_hosts(["node1"], ClusterConfig())


def test_commands_for_a_node_say_how_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("")
    typed = ["cluster=lab", "train.steps=3", "cluster.ssh.user=o'neil", "cluster.nodes=n[1-9]"]
    (host,) = resolve_hosts(["n1"], ClusterConfig(ssh=SshConfig(config_file=str(tmp_path / "config"))), typed)
    words = ["burst", "hosts", "trust", "cluster=lab", "cluster.ssh.user=o'neil", "--hosts", "n1"]
    assert shlex.split(host.command("hosts", "trust")) == words
    assert Host("n", "a") == Host("n", "a", 22, "root", "", (), (), (), None, None, 10.0, False, "", ())


def test_hundreds_of_names_are_resolved_in_seconds(tmp_path: Path) -> None:
    blocks = "".join(f"Host n{k}\n  HostName 127.0.0.1\n  Port {3000 + k}\n" for k in range(256))
    begin = sum(os.times()[:4])
    assert [host.port for host in resolve(tmp_path, blocks, *(f"n{k}" for k in range(256)))] == list(range(3000, 3256))
    assert sum(os.times()[:4]) - begin < 10  # of processors, here and in every ssh, however busy the machine is
