"""Connections as tests want them; verbs share an `SshPool`."""

from __future__ import annotations

from cluster.ssh.hosts import Host
from cluster.ssh.pool import SshPool
from cluster.ssh.session import SshConnection
from cluster.testbed.testbed import Testbed


def connect(host: Host) -> SshConnection:
    """A logged-in connection to `host`, which needs no jump host. Raises SshError."""
    assert host.jump is None, "a pool has to close the way through it"
    return SshPool().connect(host)


def run_on(testbed: Testbed, node: str, *argv: str, stdin: bytes = b"") -> str:
    """What a command on a node prints, without blanks around it; raises when it fails."""
    with connect(testbed.host(node)) as connection:
        result = connection.run(argv, stdin=stdin)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()
