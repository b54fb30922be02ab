"""known_hosts files: what counts as trusted, changed, revoked, and what a damaged line does (nothing)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import stat
import threading
from pathlib import Path

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import SshError, SshFailure
from cluster.ssh.certificates import fingerprint
from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import HostKeys, ShownKey, add_keys, forget_names, parse_line

KEY = paramiko.ECDSAKey.generate()
OTHER = paramiko.ECDSAKey.generate()
RSA = paramiko.RSAKey.generate(2048)


def line(names: str, key: paramiko.PKey = KEY, marker: str = "") -> str:
    return f"{marker}{names} {key.get_name()} {key.get_base64()} a comment\n"


def host(name: str = "10.0.0.1") -> Host:
    return Host("node1", "10.0.0.1", key_name=name)


def load(tmp_path: Path, text: str) -> HostKeys:
    path = tmp_path / "known_hosts"
    path.write_text(text)
    return HostKeys.load([str(path)])


def hashed(name: str) -> str:
    salt = b"twenty bytes of salt"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("patterns", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("a,B.example.COM", "b.example.com"),
        ("10.0.0.*", "10.0.0.1"),
        ("n?de1", "node1"),
        ("*,!node2", "node1"),
        (hashed("[10.0.0.1]:2222"), "[10.0.0.1]:2222"),
    ],
)
def test_a_key_is_known_by_names_patterns_and_hashes(tmp_path: Path, patterns: str, name: str) -> None:
    keys = load(tmp_path, line(patterns))
    keys.check(host(name), KEY.asbytes())
    assert [key.kind for key in keys.find(name)] == [KEY.get_name()]


@pytest.mark.parametrize(
    ("patterns", "name"),
    [
        ("10.0.0.1", "[10.0.0.1]:2222"),
        ("*,!node1", "node1"),
        ("n[0-9]", "n1"),
        ("10.0.0.1", "10x0x0x1"),
        (hashed("node2"), "node1"),
        ("|1|damaged", "node1"),
    ],
)
def test_other_names_are_unknown(tmp_path: Path, patterns: str, name: str) -> None:
    with pytest.raises(SshError) as caught:
        load(tmp_path, line(patterns)).check(host(name), KEY.asbytes())
    assert caught.value.kind is SshFailure.HOST_KEY_UNKNOWN
    assert fingerprint(KEY.asbytes()) in str(caught.value)


@pytest.mark.parametrize("shown", [OTHER, RSA], ids=["same type", "other type"])
def test_a_changed_key_is_refused_and_both_are_shown(tmp_path: Path, shown: paramiko.PKey) -> None:
    with pytest.raises(SshError) as caught:
        load(tmp_path, line("10.0.0.1")).check(host(), shown.asbytes())
    assert caught.value.kind is SshFailure.HOST_KEY_CHANGED
    assert all(fingerprint(key.asbytes()) in str(caught.value) for key in (shown, KEY))


def test_a_revoked_key_is_refused_even_where_it_is_known(tmp_path: Path) -> None:
    keys = load(tmp_path, line("10.0.0.1") + line("*", KEY, "@revoked "))
    with pytest.raises(SshError, match="revoked"):
        keys.check(host(), KEY.asbytes())


def test_damaged_lines_and_certificate_authorities_spoil_nothing(tmp_path: Path) -> None:
    bad = (
        "\n# comment\n\x00\xff\nonly two\n10.0.0.1 ssh-rsa not*base64\n10.0.0.1 ssh-ed25519 AAAA\n@cert-authority\n"
        + line("*", OTHER, "@cert-authority ")
        + f"10.0.0.1 ssh-ed25519 {KEY.get_base64()}\n"
    )
    keys = load(tmp_path, bad + line("10.0.0.1") + line("10.0.0.1", RSA))
    keys.check(host(), KEY.asbytes())
    assert [(key.kind, key.blob) for key in keys.find("10.0.0.1")] == [
        (KEY.get_name(), KEY.asbytes()),
        ("ssh-rsa", RSA.asbytes()),
    ]


def test_a_key_below_a_certificate_authority_is_unknown_and_the_reason_is_told(tmp_path: Path) -> None:
    keys = load(tmp_path, line("10.0.0.*", OTHER, "@cert-authority "))
    for shown in (KEY, OTHER):  # not the authority's own key either
        with pytest.raises(SshError, match="@cert-authority for it, but it shows no certificate") as caught:
            keys.check(host(), shown.asbytes())
        assert caught.value.kind is SshFailure.HOST_KEY_UNKNOWN
    with pytest.raises(SshError, match="unknown") as caught:
        keys.check(host("elsewhere"), KEY.asbytes())
    assert "@cert-authority" not in str(caught.value)


def test_files_that_are_not_there_are_empty(tmp_path: Path) -> None:
    assert HostKeys.load([str(tmp_path / "none"), str(tmp_path)]).keys == ()


@given(st.text(max_size=80), st.binary(max_size=60))
def test_no_line_raises(text: str, blob: bytes) -> None:
    for line in (text, f"node1 ssh-rsa {base64.b64encode(blob).decode()}"):
        found = parse_line(line, "file")
        assert found is None or found.matches("node1") in (True, False)


def shown(key: paramiko.PKey = KEY, name: str = "10.0.0.1") -> ShownKey:
    return ShownKey(host(name), key.asbytes(), "new")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trust store, in a place of this test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "burst" / "known_hosts"


def test_the_trust_store_is_private_and_read_back(store: Path) -> None:
    add_keys([])
    assert not store.exists()
    add_keys([shown(), shown(RSA), shown()])
    add_keys([shown()])
    assert store.read_text() == f"{shown().line}\n{shown(RSA).line}\n"
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    HostKeys.load([str(store)]).check(host(), KEY.asbytes())


def test_forgetting_takes_out_lines_about_that_name_alone(store: Path) -> None:
    forget_names(["a"])
    add_keys([shown(), shown(RSA), shown(KEY, "10.0.0.11")])
    marked = line("10.0.0.1", OTHER, "@revoked ") + line("10.0.0.1", OTHER, "@cert-authority ")
    kept = "# mine\nodd line\n" + line("*.example") + line("10.0.0.1,other") + marked
    store.write_text(kept + store.read_text())
    forget_names(["10.0.0.1", "never"])
    assert store.read_text() == kept + shown(KEY, "10.0.0.11").line + "\n"


def test_many_writers_at_once_lose_nothing(store: Path) -> None:
    threads = [threading.Thread(target=add_keys, args=([shown(KEY, f"n{k}")],)) for k in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = HostKeys.load([str(store)])
    assert all(keys.find(f"n{k}") for k in range(16))
    assert sorted(file.name for file in store.parent.iterdir()) == [".known_hosts.lock", "known_hosts"]


@pytest.mark.parametrize(
    ("known", "key", "state"),
    [
        ("", KEY, "new"),
        (line("10.0.0.1") + line("10.0.0.1", RSA), RSA, "known"),
        (line("10.0.0.1"), RSA, "changed"),  # though of another type
        (line("10.0.0.1") + line("*", KEY, "@revoked "), KEY, "revoked"),
    ],
)
def test_a_key_that_a_server_shows_is_judged_by_what_is_known(
    tmp_path: Path, known: str, key: paramiko.PKey, state: str
) -> None:
    assert load(tmp_path, known).state_of(host(), key.asbytes()) == state
