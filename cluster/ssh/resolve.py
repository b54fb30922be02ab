"""Hosts from names: OpenSSH is asked what `ssh NAME` would do (`ssh -G`), settings of `cluster.ssh` come on top.

paramiko's own reader of ssh_config knows neither Include nor Match nor ProxyJump, and a node that `ssh` reaches must be
reached here, too. Nothing here connects.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import HostsError
from cluster.remote_text import one_line
from cluster.ssh.hosts import Host, is_host_name
from cluster.ssh.keys import trust_file
from engine.config.cluster import SshConfig

Options = Mapping[str, Sequence[str]]  # what `ssh -G` says: values in order by keys in small letters

MAX_JUMPS = 8
_ASK_TIMEOUT_S = 15.0
_ASK_AT_ONCE = min(16, 2 * (os.cpu_count() or 1))
_DEFAULT_TIMEOUT_S = SshConfig().connect_timeout_s
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@\s]+)@)?\[?(?P<name>[^@\s\]]+?)\]?(?::(?P<port>\d+))?/?")
# For what goes through a log-in of `ssh` that is open to others; should it end meanwhile, ssh makes one of its own.
_SHARING = ("-o", "ControlMaster=no", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")


def resolve_hosts(names: Sequence[str], ssh: SshConfig, overrides: Iterable[str] = ()) -> tuple[Host, ...]:
    """The hosts that `names` stand for, in order. Raises HostsError for one that cannot be reached so.

    overrides: what was typed, for the commands that errors tell to type.
    One `ssh -G` per name takes 5 ms; a few run at the same time.
    """
    resolver, typed = Resolver(ssh, _openssh(ssh)), tuple(overrides)
    with ThreadPoolExecutor(_ASK_AT_ONCE, thread_name_prefix="resolve") as pool:
        return tuple(pool.map(lambda name: replace(resolver.node(name), overrides=typed), names))


@dataclass(frozen=True)
class Resolver:
    """Names to hosts. program: OpenSSH's client with what `cluster.ssh` says of every log-in."""

    ssh: SshConfig
    program: Sequence[str]

    def node(self, name: str) -> Host:
        """The host of a node, `cluster.ssh` applied."""
        return self._through(self.ssh.jump, *self._host(_place(name, self.ssh.user, self.ssh.port)))

    def _through(self, chain: str | None, target: Host, options: Options, depth: int = 0) -> Host:
        """`target` with the jump hosts before it: those of `chain`, else of its own options, else its ProxyCommand.

        The last of the chain is the nearest; only the first may have its own.
        """
        chain = chain or _given(options, "proxyjump")
        if not chain:
            return target
        target = replace(target, proxy_command=None)
        if chain == "none":
            return target
        if depth >= MAX_JUMPS:
            raise HostsError(f"{target.name}: more than {MAX_JUMPS} jump hosts in a row; do they point at each other?")
        *before, last = chain.split(",")
        found = _JUMP.fullmatch(last.strip())
        if found is None:
            raise HostsError(f"{target.name}: jump host {one_line(last)!r}: expected [USER@]HOST[:PORT]")
        place = _place(found["name"], found["user"], found["port"])
        gate, options = self._host(place)
        if (gate.address, gate.port) == (target.address, target.port):
            return target  # a jump host that a pattern of the configuration sends through itself
        path = _given(options, "controlpath")
        if Path(path).is_socket():  # a log-in of `ssh` there may have taken a password, which burst never asks for
            way = [*_SHARING, "-S", path, "-W", f"[{target.address}]:{target.port}", *place]
            return replace(target, proxy_command=shlex.join([*self.program, *way]))
        return replace(target, jump=self._through(",".join(before), gate, options, depth + 1))

    def _host(self, place: Sequence[str]) -> tuple[Host, Options]:
        """The host that `ssh PLACE` reaches, its jump hosts left out, and all that `ssh -G` says of it."""
        name, options = place[-1], _ask([*self.program, "-T", "-G", *place])
        address, port, user = _given(options, "hostname").lower(), _given(options, "port"), _given(options, "user")
        key_name = _given(options, "hostkeyalias") or (address if port == "22" else f"[{address}]:{port}")
        me = pwd.getpwuid(os.getuid())  # as OpenSSH has this user, whatever HOME says
        words = {
            "h": address,
            "n": name,
            "p": port,
            "r": user,
            "k": key_name,
            "d": me.pw_dir,
            "u": me.pw_name,
            "i": str(me.pw_uid),
            "l": os.uname().nodename,
            "%": "%",
        }

        def paths(*keys: str) -> list[str]:
            # Those of known_hosts files are absolute, parted by spaces and not quoted.
            texts = [path for key in keys for text in options.get(key, ()) for path in re.split(r" (?=[/~])", text)]
            full = (re.sub(r"^~(?=/)", me.pw_dir, text) for text in texts if text not in ("none", "/dev/null"))
            return [_fill(os.path.expandvars(text), words) for text in full]

        # Only what the user's own configuration says is a command: names, which may come from elsewhere, are words.
        command = _fill(_given(options, "proxycommand"), {key: shlex.quote(word) for key, word in words.items()})
        timeout, is_default = _given(options, "connecttimeout"), self.ssh.connect_timeout_s == _DEFAULT_TIMEOUT_S
        agent = "".join(paths("identityagent")) if "identityagent" in options else "SSH_AUTH_SOCK"
        host = Host(
            name,
            address,
            int(port),
            user,
            key_name=key_name,
            identity_files=tuple(paths("identityfile")),
            certificate_files=tuple(paths("certificatefile")),
            known_hosts=tuple(dict.fromkeys((str(trust_file()), *paths("userknownhostsfile", "globalknownhostsfile")))),
            proxy_command=command or None,
            connect_timeout_s=float(timeout) if is_default and timeout.strip("0") else self.ssh.connect_timeout_s,
            identities_only=_given(options, "identitiesonly") == "yes",
            agent_socket=os.environ.get(agent, "") if agent == "SSH_AUTH_SOCK" else agent,
        )
        return host, options


def _openssh(ssh: SshConfig) -> Sequence[str]:
    """See `Resolver`."""
    program = shutil.which("ssh")
    if program is None:
        raise HostsError("how nodes are reached is what `ssh` says, which is not installed; install openssh-client")
    words = [program]
    for name, option in (("config_file", "-F"), ("identity_file", "-i")):
        if (given := getattr(ssh, name)) is not None:
            if not Path(given).expanduser().is_file():
                raise HostsError(f"cluster.ssh.{name}={given}: no such file")
            words += [option, str(Path(given).expanduser())]
    if ssh.known_hosts is not None:
        known = f'UserKnownHostsFile="{Path(ssh.known_hosts).expanduser()}"'
        words += ["-o", known, "-o", "GlobalKnownHostsFile=none"]
    return words


def _place(name: str, user: str | None, port: int | str | None) -> list[str]:
    """The words with which `ssh` logs in at `name`."""
    if not is_host_name(name):
        raise HostsError(f"{one_line(name)!r} is no host name")
    return [*(("-l", user) if user else ()), *(("-p", str(port)) if port else ()), "--", name]


def _ask(command: Sequence[str]) -> Options:
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_TIMEOUT_S, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = one_line(error.stderr or str(error))
        raise HostsError(f"{command[-1]}: your SSH configuration cannot be used, `ssh -G` fails: {said}") from error
    options: dict[str, list[str]] = {}
    for line in answer.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options


def _given(options: Options, key: str) -> str:
    """The first value; empty for none."""
    text = options.get(key, [""])[0]
    return "" if text == "none" else text


def _fill(text: str, words: Mapping[str, str]) -> str:
    """`text` with its %-words filled in; those that are not known stay."""
    return re.sub(r"%(.)", lambda found: words.get(found[1], found[0]), text)
