"""Log-ins at a real sshd: whose host keys and certificates count, as OpenSSH's client has it, and what is offered."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from own_sshd import Server, agent_with, certify, make_key, public_key, start_sshd, write_keys
from testkit.connections import connect
from testkit.waiting import wait_for

from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host
from cluster.ssh.session import SshPool

HOST = ("-h", "-n", "127.0.0.1")
CA, OTHER, KEY, RSA = "ca.pub", "other.pub", "sshd/host_ed25519.pub", "sshd/host_rsa.pub"


@contextlib.contextmanager
def certified_server(place: Path, key: str = "host_ed25519", authority: str = "ed25519") -> Iterator[Server]:
    """An sshd with a certificate for one of its keys by `ca`; there is a key `other`, too."""
    folder = place / "sshd"
    write_keys(folder)
    make_key(place / "other")
    certificate = certify(make_key(place / "ca", authority), folder / key, *HOST)
    with start_sshd(folder, f"HostCertificate {certificate}") as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with certified_server(tmp_path_factory.mktemp("certified")) as server:
        yield server


def knows(server: Server, *lines: tuple[str, str]) -> Host:
    """The host of a server of which known_hosts has these lines: names, and the file of a key."""
    folder = server.log.parent
    texts = [f"{names} {public_key(folder.parent / file).text}\n" for names, file in lines]
    (folder / "known_hosts").write_text("".join(texts))
    return server.host


def openssh_agrees(host: Host) -> bool:
    """Whether OpenSSH's client takes the host key that it is shown."""
    rules = ["StrictHostKeyChecking=yes", "BatchMode=yes", f"UserKnownHostsFile={host.known_hosts[0]}"]
    words = [word for rule in (*rules, "GlobalKnownHostsFile=none") for word in ("-o", rule)]
    command = ["ssh", "-F", "none", "-i", host.identity_files[0], *words, "-p", str(host.port)]
    return subprocess.run([*command, f"{host.user}@{host.address}", "true"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        ([("@cert-authority 127.0.0.*", CA)], None, ""),
        ([("@cert-authority *", OTHER)], SshFailure.HOST_KEY_UNKNOWN, "does not count: by SHA256"),
        ([("@cert-authority *", OTHER), ("*", KEY)], None, ""),
        ([("@cert-authority *.lab", CA)], SshFailure.HOST_KEY_UNKNOWN, "unknown"),
        ([("@cert-authority *", CA), ("*", KEY), ("@revoked *", CA)], SshFailure.HOST_KEY_CHANGED, "revoked"),
        ([("@cert-authority *", CA), ("*", KEY), ("@revoked *", KEY)], SshFailure.HOST_KEY_CHANGED, "revoked"),
        ([("*", RSA)], None, ""),  # of its keys it shows the one that is known
    ],
)
def test_a_server_is_known_by_its_certificate_or_key_as_to_openssh(
    server: Server, lines: Sequence[tuple[str, str]], kind: SshFailure | None, words: str
) -> None:
    host = knows(server, *lines)
    assert openssh_agrees(host) == (kind is None)
    if kind is None:
        connect(host).close()
        return
    with pytest.raises(SshError, match=words) as caught:
        connect(host)
    assert caught.value.kind is kind


def test_keys_and_authorities_of_other_types_count_too(tmp_path: Path) -> None:
    with certified_server(tmp_path, "host_rsa", "rsa") as server:
        host = knows(server, ("@cert-authority *", CA))
        assert openssh_agrees(host)
        connect(host).close()


def test_trust_fetches_the_key_and_knows_what_an_authority_certified(server: Server) -> None:
    before, folder = set(threading.enumerate()), server.log.parent.parent
    for line, key, state in (
        (("@cert-authority *", CA), KEY, "known"),
        (("*", RSA), RSA, "known"),
        (("x", CA), KEY, "new"),
    ):
        with SshPool() as pool:
            shown = pool.show_key(knows(server, line))
        assert (shown.key, shown.state) == (public_key(folder / key), state)
    wait_for(lambda: set(threading.enumerate()) <= before, "the end of the connections")


@pytest.fixture
def user_server(tmp_path: Path) -> Iterator[Server]:
    """An sshd that lets in who has a certificate of `user_ca` for its user, and nobody's plain key."""
    make_key(tmp_path / "user_ca")
    with start_sshd(tmp_path / "sshd", f"TrustedUserCAKeys {tmp_path}/user_ca.pub") as server:
        (server.log.parent / "authorized_keys").write_text("")
        yield server


def certify_user(server: Server, key: Path, *options: str) -> Path:
    return certify(server.log.parent.parent / "user_ca", key, "-n", server.host.user, *options)


def refuses(host: Host, words: str = "accepts none of our keys") -> str:
    """What a log-in that fails says."""
    before = set(threading.enumerate())
    with pytest.raises(SshError, match=words) as caught:
        connect(host)
    assert caught.value.kind is SshFailure.AUTH
    wait_for(lambda: set(threading.enumerate()) <= before, "the end of the connection")
    return str(caught.value)


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_a_certificate_beside_a_key_or_named_logs_in_and_one_that_is_not_taken_leaves_the_key(
    user_server: Server, tmp_path: Path, kind: str
) -> None:
    key = make_key(tmp_path / "mine", kind)
    host = replace(user_server.host, identity_files=(str(key),))
    refuses(host)
    certificate = certify_user(user_server, key)
    connect(host).close()
    elsewhere = certificate.rename(tmp_path / "elsewhere.pub")
    refuses(host)
    connect(replace(host, certificate_files=(str(elsewhere),))).close()
    certify(make_key(tmp_path / "stranger"), key, "-n", host.user)
    assert "mine-cert.pub, " in refuses(host)
    certify_user(user_server, key, "-V", "-2d:-1d")
    assert "mine-cert.pub, which is out of date, " in refuses(host)
    (user_server.log.parent / "authorized_keys").write_text(public_key(f"{key}.pub").text)
    connect(host).close()


@pytest.mark.parametrize(("kind", "with_key"), [("ed25519", True), ("rsa", False)])
def test_an_agent_holds_certificates(user_server: Server, tmp_path: Path, kind: str, with_key: bool) -> None:
    strangers = [make_key(tmp_path / f"stranger{number}") for number in range(3)]
    key = make_key(tmp_path / "mine", kind)
    certify_user(user_server, key)
    with agent_with(*strangers) as agent:
        bare = replace(user_server.host, identity_files=(), agent_socket=agent)
        refuses(bare)
        agent.add(key)
        if not with_key:
            agent.add(key, "-d", "-k")  # takes out the plain key alone
        connect(bare).close()
        refuses(replace(bare, identities_only=True, identity_files=(str(tmp_path / "stranger1"),)))


def test_the_agents_key_takes_the_certificate_of_a_file(user_server: Server, tmp_path: Path) -> None:
    key = make_key(tmp_path / "mine")
    with agent_with(key) as agent:
        certificate = certify_user(user_server, key)
        bare = replace(user_server.host, identity_files=(), agent_socket=agent, certificate_files=(str(certificate),))
        connect(bare).close()


def test_keys_that_cannot_be_used_are_skipped_with_a_word(server: Server, tmp_path: Path) -> None:
    host, garbage = knows(server, ("*", KEY)), tmp_path / "garbage"
    locked = make_key(tmp_path / "locked", passphrase="passphrase")
    garbage.write_bytes(b"\xff no key")
    files = (str(tmp_path / "none"), str(locked), str(garbage))
    text = refuses(replace(host, identity_files=files))
    assert f"skipped: {locked} (Key is password-protected" in text
    assert f"{garbage} (" in text
    assert str(tmp_path / "none") not in text
    connect(replace(host, identity_files=(*files, *host.identity_files))).close()


def test_the_agents_keys_are_offered_unless_only_named_ones_may_be(server: Server, tmp_path: Path) -> None:
    host = knows(server, ("*", KEY))
    key = Path(host.identity_files[0])
    with agent_with(key) as agent:
        bare = replace(host, identity_files=(), agent_socket=agent)
        with connect(bare) as connection:
            # No forwarding: a session of ours must not be a way to the agent.
            assert connection.run(["sh", "-c", "echo [$SSH_AUTH_SOCK]"]).stdout == b"[]\n"
        assert "tried: none" in refuses(replace(bare, identities_only=True))
        shutil.copy(f"{key}.pub", tmp_path / "id.pub")
        connect(replace(bare, identities_only=True, identity_files=(str(tmp_path / "id"),))).close()


def test_an_agent_that_does_not_answer_is_done_without(server: Server) -> None:
    host = knows(server, ("*", KEY))
    with TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as mute:  # tests' paths are too long
        mute.bind(f"{folder}/agent")
        mute.listen()
        for name, limit_s in (("none", 10.0), ("agent", 8.0)):
            connect(replace(host, agent_socket=f"{folder}/{name}", connect_timeout_s=limit_s)).close()


def test_a_second_factor_is_not_a_log_in(tmp_path: Path) -> None:
    options = ("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    with start_sshd(tmp_path / "two", *options) as server:
        refuses(server.host, "wants more than a key from user .*: password")
