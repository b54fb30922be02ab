"""What known_hosts files trust: names, changed and revoked keys, certificates, damaged lines; burst's own file."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_sshd import certify, make_key, public_key

from cluster.errors import SshError, SshFailure
from cluster.ssh.hosts import Host
from cluster.ssh.transport import HostKeys, PublicKey, ShownKey, add_keys, clear_names, vouches

SECRET = paramiko.ECDSAKey.generate()
KEY, OTHER = PublicKey(SECRET.asbytes()), PublicKey(paramiko.ECDSAKey.generate().asbytes())
RSA = PublicKey(paramiko.RSAKey.generate(2048).asbytes())


def host(name: str = "10.0.0.1") -> Host:
    return Host("node1", "10.0.0.1", key_name=name)


def load(tmp_path: Path, text: str) -> HostKeys:
    path = tmp_path / "known_hosts"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return HostKeys.load([str(path), str(tmp_path / "none"), str(tmp_path)])


def hashed(name: str) -> str:
    salt = b"twenty bytes of salt"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("patterns", "name", "is_known"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("a,B.example.COM", "b.example.com", True),
        ("10.0.0.*", "10.0.0.1", True),
        ("n?de1", "node1", True),
        ("*,!node2", "node1", True),
        (hashed("[10.0.0.1]:2222"), "[10.0.0.1]:2222", True),
        ("10.0.0.1", "[10.0.0.1]:2222", False),
        ("*,!node1", "node1", False),
        ("n[0-9]", "n1", False),
        ("10.0.0.1", "10x0x0x1", False),
        (hashed("node2"), "node1", False),
        ("|1|damaged", "node1", False),
        ("#other,node1", "node1", False),
        ("# node1", "node1", False),
    ],
)
def test_a_key_is_known_by_names_patterns_and_hashes(tmp_path: Path, patterns: str, name: str, is_known: bool) -> None:
    keys = load(tmp_path, f"{patterns} {KEY.text} a comment\n")
    if is_known:
        keys.check(host(name), KEY)
        return
    with pytest.raises(SshError, match=KEY.fingerprint.replace("+", r"\+")) as caught:
        keys.check(host(name), KEY)
    assert caught.value.kind is SshFailure.HOST_KEY_UNKNOWN


@pytest.mark.parametrize(
    ("known", "shown", "state", "words"),
    [
        ("", KEY, "new", ["unknown", KEY.fingerprint]),
        (f"@cert-authority 10.0.0.* {OTHER.text}", KEY, "new", ["no certificate", "@cert-authority for it"]),
        (f"@cert-authority * {KEY.text}", KEY, "new", ["unknown"]),  # not the authority's own key either
        (f"10.0.0.1 {KEY.text}\n10.0.0.1 {RSA.text}", RSA, "known", []),
        (f"10.0.0.1 {KEY.text}", OTHER, "changed", [KEY.fingerprint, OTHER.fingerprint, "hosts forget"]),
        (f"10.0.0.1 {KEY.text}", RSA, "changed", ["hosts forget --hosts node1"]),  # though of another type
        (f"10.0.0.1 {KEY.text}\n  @revoked * {KEY.text}", KEY, "revoked", ["revoked"]),
    ],
)
def test_a_key_that_a_server_shows_is_judged_by_what_is_known(
    tmp_path: Path, known: str, shown: PublicKey, state: str, words: Sequence[str]
) -> None:
    keys = load(tmp_path, known)
    assert keys.state_of(host(), shown) == state
    if state != "known":
        with pytest.raises(SshError) as caught:
            keys.check(host(), shown)
        assert all(word in str(caught.value) for word in words)
        assert caught.value.kind is (SshFailure.HOST_KEY_UNKNOWN if state == "new" else SshFailure.HOST_KEY_CHANGED)


def test_damaged_lines_spoil_nothing(tmp_path: Path) -> None:
    bad = (
        f"\n# comment\n\x00\udcff\nonly two\n10.0.0.1 {OTHER.text[:40]}*{OTHER.text[40:]}\n10.0.0.1 ssh-ed25519 AAAA\n"
        "@cert-authority\n10.0.0.1 x AAAAAf8=\n"
        f"@odd 10.0.0.1 {OTHER.text}\n10.0.0.1 ssh-ed25519 {KEY.text.split()[1]}\n"
    )
    keys = load(tmp_path, f"{bad}10.0.0.1 {KEY.text}\n10.0.0.1 {RSA.text}")
    assert [line.key for line in keys.find("10.0.0.1")] == [KEY, RSA]
    assert [line.key.kind for line in keys.keys] == ["ecdsa-sha2-nistp256", "ssh-rsa"]


@given(st.text(max_size=80), st.binary(max_size=60))
def test_no_line_raises(tmp_path_factory: pytest.TempPathFactory, text: str, blob: bytes) -> None:
    lines = f"{text}\nnode1 ssh-rsa {base64.b64encode(blob).decode()}\n"
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_text(lines, errors="replace")
    HostKeys.load([str(path)]).find("node1")


HOST = ("-h", "-n", "127.0.0.1")
# What ssh-keygen is told, and whether the certificate counts then.
CERTIFICATES = {
    "its name": (HOST, True),
    "a pattern": (("-h", "-n", "other,127.0.0.*"), True),
    "still valid": ((*HOST, "-V", "-1h:+1h"), True),
    "no name": (("-h",), False),
    "another name": (("-h", "-n", "127.0.0.2,other"), False),
    "part of a name": (("-h", "-n", "127.0.0"), False),
    "expired": ((*HOST, "-V", "-2d:-1d"), False),
    "not yet valid": ((*HOST, "-V", "+1d:+2d"), False),
    "a user's": (("-n", "127.0.0.1"), False),
    "an option": ((*HOST, "-O", "critical:burst-test=1"), False),
    "sha-1": ((*HOST, "-t", "ssh-rsa"), False),
}


@pytest.mark.parametrize("case", CERTIFICATES)
def test_a_certificate_vouches_for_a_host_or_what_it_says_is_told(tmp_path: Path, case: str) -> None:
    options, counts = CERTIFICATES[case]
    authority = make_key(tmp_path / "ca", "rsa" if case == "sha-1" else "ed25519")
    shown = public_key(certify(authority, make_key(tmp_path / "key"), *options))
    assert vouches(shown, "127.0.0.1", [public_key(f"{authority}.pub")]) == counts
    assert not vouches(shown, "127.0.0.1", [OTHER])
    keys = load(tmp_path, f"@cert-authority * {public_key(f'{authority}.pub').text}")
    if not counts:
        end = "" if "-V" in options else re.escape(time.ctime(1 << 40))
        with pytest.raises(SshError, match=rf"does not count: by SHA256:.* for a (host|user), .* until {end}"):
            keys.check(host("[127.0.0.1]:22"), shown)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[PublicKey, PublicKey]:
    """A certificate that counts, and its authority."""
    place = tmp_path_factory.mktemp("certificate")
    authority = make_key(place / "ca")
    return public_key(certify(authority, make_key(place / "key"), *HOST)), public_key(f"{authority}.pub")


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_damaged_certificate_counts(certificate: tuple[PublicKey, PublicKey], data: st.DataObject) -> None:
    shown, authority = certificate
    assert vouches(shown, "127.0.0.1", [authority])
    at, cut = data.draw(st.integers(0, len(shown) - 1)), data.draw(st.integers(0, len(shown) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    for damaged in (shown[:at] + bytes([shown[at] ^ bit]) + shown[at + 1 :], shown[:cut]):
        assert not vouches(PublicKey(damaged), "127.0.0.1", [authority])


def shown(key: PublicKey = KEY, name: str = "10.0.0.1") -> ShownKey:
    return ShownKey(host(name), key, "new")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trust store, in a place of this test's own."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".config" / "burst" / "known_hosts"


def test_the_trust_store_is_private_and_read_back(store: Path) -> None:
    add_keys([])
    assert not store.exists()
    add_keys([shown(), shown(RSA), shown()])
    add_keys([shown()])
    assert store.read_text() == f"10.0.0.1 {KEY.text}\n10.0.0.1 {RSA.text}\n"
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    HostKeys.load([str(store)]).check(host(), KEY)


def test_forgetting_takes_out_lines_about_that_name_alone(store: Path) -> None:
    add_keys([shown(), shown(RSA), shown(KEY, "10.0.0.11")])
    marked = f"@revoked 10.0.0.1 {OTHER.text}\n@cert-authority 10.0.0.1 {OTHER.text}\n"
    kept = f"# mine\nodd line\n\n\n*.example {KEY.text}\n10.0.0.1,other {KEY.text}\n{marked}".encode() + b"\xff\n"
    store.write_bytes(kept + store.read_bytes())
    clear_names(["10.0.0.1", "never"])
    assert store.read_bytes() == kept + f"10.0.0.11 {KEY.text}\n".encode()


def test_many_writers_at_once_lose_nothing(store: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda k: add_keys([shown(KEY, f"n{k}")]), range(16)))
    keys = HostKeys.load([str(store)])
    assert all(keys.find(f"n{k}") for k in range(16))
    assert sorted(file.name for file in store.parent.iterdir()) == [".known_hosts.lock", "known_hosts"]
