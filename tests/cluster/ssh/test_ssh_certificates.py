"""Certificates of hosts and of users, made by ssh-keygen, shown by a real sshd; OpenSSH's client is the judge."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_sshd import Server, agent_with, start_sshd, write_keys
from testkit.connecting import connect
from testkit.waiting import wait_for

from cluster.errors import SshError, SshFailure
from cluster.ssh.certificates import objection
from cluster.ssh.hosts import Host
from cluster.ssh.pool import SshPool


def make_key(path: Path, kind: str = "ed25519") -> Path:
    size = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", kind, *size, "-f", str(path)], check=True)
    return path


def certify(authority: Path, key: Path, *options: str) -> Path:
    """The certificate of `key`, beside it, made anew."""
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "test", *options, f"{key}.pub"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return key.with_name(f"{key.name}-cert.pub")


def public(path: Path) -> str:
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def blob_of(path: Path) -> bytes:
    return base64.b64decode(path.read_text().split()[1])


@contextlib.contextmanager
def certified_server(folder: Path, *options: str, key: str = "host_ed25519", authority: str = "ca") -> Iterator[Server]:
    """An sshd that shows a certificate for one of its keys; only what lines of authorities say is known of it."""
    write_keys(folder)
    shutil.copy(folder.parent / authority, folder / authority)
    certificate = certify(folder / authority, folder / key, *options)
    with start_sshd(folder, f"HostCertificate {certificate}") as server:
        yield server


def knows(server: Server, *lines: str) -> Host:
    """The host of a server of which known_hosts says nothing but `lines`."""
    (server.log.parent / "known_hosts").write_text("".join(f"{line}\n" for line in lines))
    return server.host


def openssh_agrees(host: Host) -> bool:
    """Whether OpenSSH's client takes the host key that it is shown."""
    rules = ["StrictHostKeyChecking=yes", "BatchMode=yes", f"UserKnownHostsFile={host.known_hosts[0]}"]
    words = [word for rule in (*rules, "GlobalKnownHostsFile=none") for word in ("-o", rule)]
    command = ["ssh", "-F", "none", "-i", host.identity_files[0], *words, "-p", str(host.port)]
    return subprocess.run([*command, f"{host.user}@{host.address}", "true"], capture_output=True).returncode == 0


HOST = ("-h", "-n", "127.0.0.1")
# What ssh-keygen is told, and why the certificate does not count then.
CERTIFICATES = {
    "its name": (HOST, ""),
    "a pattern": (("-h", "-n", "other,127.0.0.*"), ""),
    "still valid": ((*HOST, "-V", "-1h:+1h"), ""),
    "no name": (("-h",), "it names no host"),
    "another name": (("-h", "-n", "127.0.0.2,other"), "it is for 127.0.0.2, other, not for 127.0.0.1"),
    "part of a name": (("-h", "-n", "127.0.0"), "not for"),
    "expired": ((*HOST, "-V", "-2d:-1d"), "it expired on"),
    "not yet valid": ((*HOST, "-V", "+1d:+2d"), "not valid before"),
    "a user's": (("-n", "127.0.0.1"), "a user's"),
    "an option": ((*HOST, "-O", "critical:burst-test=1"), "it demands burst-test"),
}


@pytest.mark.parametrize("case", CERTIFICATES)
def test_a_certificate_vouches_for_a_host_or_the_reason_why_it_does_not_is_told(tmp_path: Path, case: str) -> None:
    authority, key = make_key(tmp_path / "ca"), make_key(tmp_path / "key")
    options, words = CERTIFICATES[case]
    told = objection(blob_of(certify(authority, key, *options)), "127.0.0.1", [blob_of(Path(f"{authority}.pub"))])
    assert words in told
    assert bool(words) == bool(told)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a good certificate of `ca`; there is a key `other`, too."""
    place = tmp_path_factory.mktemp("certified")
    make_key(place / "ca")
    make_key(place / "other")
    with certified_server(place / "sshd", *HOST) as server:
        yield server


CA, OTHER, KEY = "ca", "other", "sshd/host_ed25519"


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        ([("@cert-authority 127.0.0.*", CA)], None, ""),
        ([("@cert-authority *", OTHER)], SshFailure.HOST_KEY_UNKNOWN, "no @cert-authority for 127.0.0.1"),
        ([("@cert-authority *", OTHER), ("*", KEY)], None, ""),
        ([("@cert-authority *.lab", CA)], SshFailure.HOST_KEY_UNKNOWN, "unknown"),
        ([("@cert-authority *", CA), ("*", KEY), ("@revoked *", CA)], SshFailure.HOST_KEY_CHANGED, "revoked"),
        ([("@cert-authority *", CA), ("*", KEY), ("@revoked *", KEY)], SshFailure.HOST_KEY_CHANGED, "revoked"),
    ],
)
def test_a_server_is_known_by_its_certificate_as_to_openssh(
    server: Server, lines: list[tuple[str, str]], kind: SshFailure | None, words: str
) -> None:
    place = server.log.parent.parent
    host = knows(server, *(f"{marker} {public(place / key)}" for marker, key in lines))
    assert openssh_agrees(host) == (kind is None)
    if kind is None:
        connect(host).close()
        return
    with pytest.raises(SshError, match=words) as caught:
        connect(host)
    assert caught.value.kind is kind


def test_keys_and_authorities_of_other_types_count_too(tmp_path: Path) -> None:
    make_key(tmp_path / "ca", "rsa")
    with certified_server(tmp_path / "sshd", *HOST, key="host_rsa") as server:
        host = knows(server, f"@cert-authority * {public(tmp_path / 'ca')}")
        assert openssh_agrees(host)
        connect(host).close()


def test_a_signature_with_sha1_is_no_signature(tmp_path: Path) -> None:
    authority, key = make_key(tmp_path / "ca", "rsa"), make_key(tmp_path / "key")
    good = blob_of(certify(authority, key, *HOST))
    old = blob_of(certify(authority, key, *HOST, "-t", "ssh-rsa"))
    authorities = [blob_of(Path(f"{authority}.pub"))]
    assert objection(good, "127.0.0.1", authorities) == ""
    assert "SHA-1" in objection(old, "127.0.0.1", authorities)


def test_trust_fetches_the_plain_key_of_a_server_with_certificates(server: Server) -> None:
    before, folder = set(threading.enumerate()), server.log.parent
    for line, found in (
        (f"@cert-authority * {public(folder.parent / CA)}", (public(folder / "host_ed25519"), "new")),
        (f"* {public(folder / 'host_rsa')}", (public(folder / "host_rsa"), "known")),
    ):
        host = knows(server, line)
        with SshPool() as pool:
            shown = pool.show_key(host)
        assert (shown.line, shown.state) == (f"{host.key_name} {found[0]}", found[1])
    wait_for(lambda: set(threading.enumerate()) <= before, "the end of the connections")


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_damaged_certificate_counts(server: Server, data: st.DataObject) -> None:
    folder = server.log.parent
    blob = blob_of(folder / "host_ed25519-cert.pub")
    authorities = [blob_of(folder.parent / f"{CA}.pub")]
    assert objection(blob, "127.0.0.1", authorities) == ""
    at = data.draw(st.integers(0, len(blob) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(blob) - 1))
    assert objection(blob[:at] + bytes([blob[at] ^ bit]) + blob[at + 1 :], "127.0.0.1", authorities)
    assert objection(blob[:cut], "127.0.0.1", authorities)


@pytest.fixture
def user_server(tmp_path: Path) -> Iterator[Server]:
    """An sshd that lets in who has a certificate of `user_ca` for its user, and nobody's plain key."""
    make_key(tmp_path / "user_ca")
    options = (f"TrustedUserCAKeys {tmp_path}/user_ca.pub", "LogLevel VERBOSE")
    with start_sshd(tmp_path / "sshd", *options) as server:
        (server.log.parent / "authorized_keys").write_text("")
        yield server


def certify_user(server: Server, key: Path, *options: str) -> Path:
    return certify(server.log.parent.parent / "user_ca", key, "-n", server.host.user, *options)


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_a_certificate_beside_a_key_or_named_by_the_configuration_logs_in(
    user_server: Server, tmp_path: Path, kind: str
) -> None:
    key = make_key(tmp_path / "mine", kind)
    host = replace(user_server.host, identity_files=(str(key),))
    with pytest.raises(SshError, match="accepts none of our keys"):
        connect(host)
    certificate = certify_user(user_server, key)
    connect(host).close()
    elsewhere = certificate.rename(tmp_path / "elsewhere.pub")
    connect(replace(host, certificate_files=(str(elsewhere),))).close()


def test_a_certificate_that_expired_is_told_and_one_that_is_not_taken_leaves_the_key(
    user_server: Server, tmp_path: Path
) -> None:
    key = make_key(tmp_path / "mine")
    host = replace(user_server.host, identity_files=(str(key),))
    certify_user(user_server, key, "-V", "-2d:-1d")
    with pytest.raises(SshError, match=r"mine-cert.pub \(it expired on"):
        connect(host)
    certify(make_key(tmp_path / "stranger"), key, "-n", host.user)
    (user_server.log.parent / "authorized_keys").write_text(public(key))
    connect(host).close()


@pytest.mark.parametrize(("kind", "with_key"), [("ed25519", True), ("rsa", False)])
def test_an_agent_holds_certificates(user_server: Server, tmp_path: Path, kind: str, with_key: bool) -> None:
    strangers = [make_key(tmp_path / f"stranger{number}") for number in range(3)]
    key = make_key(tmp_path / "mine", kind)
    certify_user(user_server, key)
    with agent_with(tmp_path, *strangers) as agent:
        bare = replace(user_server.host, identity_files=(), agent_socket=agent)
        with pytest.raises(SshError, match="accepts none of our keys"):
            connect(bare)
        agent.add(key)
        if not with_key:
            agent.add(key, "-d", "-k")  # takes out the plain key alone
        connect(bare).close()
        named = replace(bare, identities_only=True, identity_files=(str(tmp_path / "stranger1"),))
        with pytest.raises(SshError, match="accepts none of our keys"):
            connect(named)


def test_the_agents_key_takes_the_certificate_of_a_file(user_server: Server, tmp_path: Path) -> None:
    key = make_key(tmp_path / "mine")
    with agent_with(tmp_path, key) as agent:
        certificate = certify_user(user_server, key)
        bare = replace(user_server.host, identity_files=(), agent_socket=agent, certificate_files=(str(certificate),))
        connect(bare).close()
