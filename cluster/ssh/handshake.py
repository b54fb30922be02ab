"""From a connected socket to a logged-in session, one step each: key exchange, tunnel, log-in."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import paramiko

from cluster.errors import SshError, SshFailure
from cluster.remote_text import one_line
from cluster.ssh.deadline import Deadline
from cluster.ssh.hosts import Host
from cluster.ssh.identities import offered_keys, open_agent
from cluster.ssh.transport import SshTransport

# The names of an RSA key's signatures, of which known_hosts knows nothing.
_SIGNATURES = {"rsa-sha2-512": "ssh-rsa", "rsa-sha2-256": "ssh-rsa"}
_REFUSALS = (
    ("refused", SshFailure.REFUSED, "is sshd running there?"),
    ("timed out", SshFailure.TIMEOUT, "is the node up?"),
    ("not known", SshFailure.DNS, "check the name; the jump host looks it up"),
    ("resol", SshFailure.DNS, "check the name; the jump host looks it up"),
)


class DroppedError(Exception):
    """The server ended the connection before it knew who we are, as one with too many strangers at its door does."""

    def as_error(self, host: Host, attempts: int) -> SshError:
        """What to tell when no attempt got further."""
        tried = f", {attempts} times" if attempts > 1 else ""
        text = f"no SSH handshake: {self}{tried}"
        remedy = "is it an SSH server? too many log-ins at once are dropped by its MaxStartups"
        if host.proxy_command is not None:
            remedy = "your SSH configuration reaches it by a ProxyCommand: does plain `ssh` reach it?"
        return SshError(host.name, SshFailure.PROTOCOL, text, remedy)


def shake_hands(
    host: Host, transport: SshTransport, deadline: Deadline, types: Sequence[str], *, only_these: bool = False
) -> None:
    """Exchange keys, so that the server's host key can be looked at.

    types: of the keys that are known: they are asked for first, or a server with several may show one that nobody has
    seen. only_these: no other type will do. Raises SshError (TIMEOUT, PROTOCOL) or DroppedError.
    """
    options = transport.get_security_options()
    known = [kind for kind in options.key_types if _SIGNATURES.get(kind, kind) in types]
    others = () if only_these else (kind for kind in options.key_types if kind not in known)
    options.key_types = (*known, *others)
    transport.banner_timeout = deadline.left_s + 1  # paramiko's own ends after 15 s, whatever the deadline is
    done = threading.Event()
    transport.start_client(event=done)
    if not done.wait(deadline.left_s):
        silent = "stays silent" if not transport.remote_version else "does not finish its handshake"
        text, remedy = f"connected, but the SSH server {silent}", "is the node overloaded or its sshd stopped?"
        raise SshError(host.name, SshFailure.TIMEOUT, text, remedy)
    if transport.is_active() and transport.initial_kex_done:
        return
    error = transport.get_exception()
    spoken = one_line(transport.packetizer.first_line, 60)
    if spoken and not spoken.startswith("SSH-"):
        detail = f"it says {spoken!r}"
    else:
        detail = one_line(transport.goodbye or _without_prefix(error) or "it closed the connection")
    if transport.goodbye or error is None or isinstance(error, EOFError | OSError) or _is_end_of_file(error):
        raise DroppedError(detail)
    raise SshError(host.name, SshFailure.PROTOCOL, f"no SSH handshake: {detail}", "is it an SSH server?")


def open_tunnel(host: Host, jump: SshTransport, deadline: Deadline) -> paramiko.Channel:
    """A channel through `jump` to the port of `host`."""
    name = host.jump.name if host.jump is not None else "the jump host"
    try:
        return jump.open("direct-tcpip", deadline.left_s, (host.address, host.port))
    except paramiko.ChannelException as error:
        detail = one_line(error.text) or "no reason given"
        text = f"jump host {name} cannot connect to {host.address} port {host.port}: {detail}"
        if error.code == 1:
            raise SshError(host.name, SshFailure.UNREACHABLE, text, "allow AllowTcpForwarding in its sshd") from error
        for word, kind, remedy in _REFUSALS:
            if word in detail.lower():
                raise SshError(host.name, kind, text, remedy) from error
        raise SshError(host.name, SshFailure.UNREACHABLE, text) from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        if not jump.is_active():
            text = f"the connection to jump host {name} ended"
            raise SshError(host.name, SshFailure.LOST, text) from error
        text = f"jump host {name} gets no answer from {host.address} port {host.port}"
        raise SshError(host.name, SshFailure.TIMEOUT, text, "is the node up?") from error


def log_in(host: Host, transport: SshTransport, deadline: Deadline) -> None:
    """Offer key after key until the server takes one. Raises SshError (AUTH, TIMEOUT, PROTOCOL)."""
    agent = open_agent(host, deadline.left_s)
    try:
        offers, skipped = offered_keys(host, agent)
        if any(_accepts(host, transport, deadline, key) for key in offers.values()):
            return
    finally:
        if agent is not None:
            agent.close()
    text = f"accepts none of our keys for user {host.user} (tried: {', '.join(offers) or 'none'}"
    text += f"; skipped: {', '.join(skipped)})" if skipped else ")"
    remedy = "add your public key to its authorized_keys, or set cluster.ssh.user or cluster.ssh.identity_file"
    raise SshError(host.name, SshFailure.AUTH, text, remedy)


def _accepts(host: Host, transport: SshTransport, deadline: Deadline, key: paramiko.PKey) -> bool:
    """Whether the server lets us in with `key`."""
    transport.auth_timeout = max(0.01, deadline.left_s)
    try:
        missing = transport.auth_publickey(host.user, key)
    except (paramiko.SSHException, OSError, EOFError) as error:
        if deadline.is_over:
            text = f"the SSH server does not finish the log-in of user {host.user}"
            raise SshError(host.name, SshFailure.TIMEOUT, text, "is the node overloaded?") from error
        if transport.is_active():
            return False
        if "authentication" in transport.goodbye.lower():
            text, remedy = f"refused user {host.user}: {transport.goodbye}", "set cluster.ssh.identity_file"
            raise SshError(host.name, SshFailure.AUTH, text, remedy) from error
        text = f"the connection ended during the log-in: {transport.goodbye or words(error)}"
        raise SshError(host.name, SshFailure.PROTOCOL, text) from error
    if missing:
        text = f"wants more than a key from user {host.user}: {one_line(', '.join(missing), 80)}"
        raise SshError(host.name, SshFailure.AUTH, text, "burst logs in by key alone")
    return True


def _is_end_of_file(error: BaseException) -> bool:
    """Whether paramiko's error about the first line only says that the connection ended."""
    cause = error.__context__
    return str(error).startswith("Error reading SSH protocol banner") and isinstance(cause, EOFError | OSError)


def _without_prefix(error: BaseException | None) -> str:
    if error is None or isinstance(error, EOFError):
        return ""
    cause = error.__context__
    if str(error).startswith("Error reading SSH protocol banner"):
        return "" if cause is None or isinstance(cause, EOFError) else words(cause)
    return words(error)


def words(error: BaseException) -> str:
    """What an exception says, or its name when it says nothing."""
    return one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)
