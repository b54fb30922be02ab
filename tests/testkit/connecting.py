"""A connection by itself, as tests want it; verbs share an `SshPool`."""

from __future__ import annotations

from cluster.ssh.hosts import Host
from cluster.ssh.pool import SshPool
from cluster.ssh.session import SshConnection


def connect(host: Host) -> SshConnection:
    """A logged-in connection to `host`, which needs no jump host. Raises SshError."""
    assert host.jump is None, "a pool has to close the way through it"
    return SshPool().connect(host)
