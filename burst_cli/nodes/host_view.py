"""Hosts and their keys as tables and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from burst_cli.figures import DASH
from burst_cli.tables import listing
from cluster.ssh.certificates import fingerprint
from cluster.ssh.hosts import Host
from cluster.ssh.known_hosts import HostKeys
from cluster.ssh.trust import ShownKey

_STYLES = {"known": "green", "added": "green", "new": "yellow"}


def describe_hosts(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """How each host is reached, as plain values; `keys` are those that are trusted for it, authorities last."""
    known = {files: HostKeys.load(files) for files in {host.known_hosts for host in hosts}}
    return [_describe(host, known[host.known_hosts]) for host in hosts]


def _describe(host: Host, known: HostKeys) -> dict[str, Any]:
    jumps: list[str] = []
    outermost = host
    while outermost.jump is not None:
        outermost = outermost.jump
        jumps.insert(0, f"{outermost.user}@{outermost.address}:{outermost.port}")
    keys = [*known.find(host.key_name), *known.authorities(host)]
    return {
        "name": host.name,
        "address": host.address,
        "port": host.port,
        "user": host.user,
        "jump": jumps,
        "proxy_command": outermost.proxy_command,
        "identity_files": list(host.identity_files),
        "key_name": host.key_name,
        "keys": [
            {"type": f"{key.marker} {key.kind}".strip(), "fingerprint": fingerprint(key.blob), "file": key.file}
            for key in keys
        ],
    }


def describe_key(key: ShownKey, *, added: bool = False) -> dict[str, Any]:
    """A key that a server showed, as plain values."""
    return {"type": key.kind, "fingerprint": key.fingerprint, "state": "added" if added else key.state}


def host_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per host of `describe_hosts`."""
    headings = ("node", "address", "port", "user", "through", "host key", "known in")
    return listing(headings, map(_host_cells, rows), ["port"])


def _host_cells(row: Mapping[str, Any]) -> tuple[str | Text, ...]:
    keys, through = row["keys"], ", ".join([*filter(None, [row["proxy_command"]]), *row["jump"]]) or DASH
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    shown = f"{keys[0]['type']} {keys[0]['fingerprint']}{more}" if keys else Text("unknown", "yellow")
    file = keys[0]["file"] if keys else DASH
    return row["name"], row["address"], str(row["port"]), row["user"], through, shown, file


def key_table(keys: Sequence[ShownKey]) -> Table:
    """One line per key that a server showed."""
    rows = (
        (key.host.name, key.kind, key.fingerprint, Text(key.state, _STYLES.get(key.state, "bold red"))) for key in keys
    )
    return listing(("node", "type", "fingerprint", "state"), rows)
