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
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import HostsError
from cluster.remote_text import one_line
from cluster.ssh.hosts import Host, is_host_name, reaching
from cluster.ssh.known_hosts import trust_file
from engine.config.cluster import SshConfig

Options = Mapping[str, Sequence[str]]  # what `ssh -G` says: values in order by keys in small letters

MAX_JUMPS = 8
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\+-]{0,127}\$?")
_ASK_TIMEOUT_S = 15.0
_ASK_AT_ONCE = min(16, 2 * (os.cpu_count() or 1))
_DEFAULT_TIMEOUT_S = SshConfig().connect_timeout_s
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@\s]+)@)?(?:\[(?P<v6>[^\]\s]+)\]|(?P<host>[^:\s]+))(?::(?P<port>\d+))?/?")


def resolve_hosts(names: Sequence[str], ssh: SshConfig, overrides: Iterable[str] = ()) -> tuple[Host, ...]:
    """The hosts that `names` stand for, in order. Raises HostsError with every name that cannot be reached this way.

    overrides: what was typed, for the commands that errors tell to type.
    One `ssh -G` per name takes 5 ms; a few run at the same time.
    """
    resolver = Resolver(ssh, _openssh(ssh))
    with ThreadPoolExecutor(_ASK_AT_ONCE, thread_name_prefix="resolve") as pool:
        answers = list(pool.map(lambda name: _attempt(resolver, name), names))
    problems = [problem for answer in answers if isinstance(answer, HostsError) for problem in answer.problems]
    if problems:
        raise HostsError(list(dict.fromkeys(problems)))
    words = reaching(overrides)
    return tuple(replace(answer, reached_by=words) for answer in answers if isinstance(answer, Host))


@dataclass(frozen=True)
class Resolver:
    """Names to hosts. program: OpenSSH's client with the words that choose its configuration."""

    ssh: SshConfig
    program: Sequence[str]

    def node(self, name: str) -> Host:
        """The host of a node, `cluster.ssh` applied."""
        if not is_host_name(name):
            raise HostsError(f"{one_line(name)!r} is no host name")
        host, options = self._host(name, _login_words(self.ssh.user, self.ssh.port))
        if self.ssh.identity_file is not None:
            host = replace(host, identity_files=(self._own_key(self.ssh.identity_file),), identities_only=True)
        return self._through(self.ssh.jump, host, options, depth=0)

    def _through(self, chain: str | None, target: Host, options: Options, depth: int) -> Host:
        """`target` with the way to it: the jump hosts of `chain`, else of its own options, else its ProxyCommand.

        The last of the chain is the nearest; only the first may have its own.
        """
        chain = chain if chain is not None else _given(options, "proxyjump") or None
        if chain is None:
            return self._behind_command(target, options)
        if chain.strip() in ("", "none"):
            return target
        if depth >= MAX_JUMPS:
            raise HostsError(f"{target.name}: more than {MAX_JUMPS} jump hosts in a row; do they point at each other?")
        *before, last = chain.split(",")
        found = _JUMP.fullmatch(last.strip())
        name = (found["v6"] or found["host"]) if found else ""
        if found is None or not is_host_name(name):
            raise HostsError(f"{target.name}: jump host {one_line(last)!r}: expected [USER@]HOST[:PORT]")
        login = _login_words(found["user"], found["port"])
        host, options = self._host(name, login)
        if (host.address, host.port) == (target.address, target.port):
            return target  # a jump host that a pattern of the configuration sends through itself
        if shared := self._shared_login([*login, "--", name], options, target):
            return replace(target, proxy_command=shared)
        if self.ssh.identity_file is not None:
            key = self._own_key(self.ssh.identity_file)
            host = replace(host, identity_files=tuple(dict.fromkeys((*host.identity_files, key))))
        return replace(target, jump=self._through(",".join(before) or None, host, options, depth + 1))

    def _shared_login(self, jump: Sequence[str], options: Options, target: Host) -> str | None:
        """The command that reaches `target` through a log-in of `ssh` at a jump host which is open to others
        (ControlMaster), if there is one: it may have taken a password, which burst never asks for.
        """
        path = _given(options, "controlpath")
        if not Path(path).is_socket():
            return None
        # Should that log-in end meanwhile, ssh makes one of its own, under the same rules.
        rules = ["-o", "ControlMaster=no", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
        return shlex.join([*self.program, *rules, "-S", path, "-W", f"[{target.address}]:{target.port}", *jump])

    def _host(self, name: str, login: Sequence[str]) -> tuple[Host, Options]:
        """A host as `ssh LOGIN NAME` has it, and all that `ssh -G` says of it."""
        options = _ask([*self.program, "-G", *login, "--", name])
        address, user = (_given(options, "hostname") or name).lower(), _given(options, "user")
        port, alias = int(_given(options, "port")), _given(options, "hostkeyalias")
        words = {"h": address, "n": name, "r": user, "p": str(port), "k": alias or name}
        host = Host(
            name,
            address,
            port,
            user,
            key_name=alias or (address if port == 22 else f"[{address}]:{port}"),  # as known_hosts spells it
            identity_files=self._paths(options, "identityfile", words),
            certificate_files=self._paths(options, "certificatefile", words),
            known_hosts=self._known_hosts(options),
            connect_timeout_s=self._timeout_s(options),
            identities_only=_given(options, "identitiesonly") == "yes",
            agent_socket=self._agent(options, words),
        )
        return host, options

    def _behind_command(self, host: Host, options: Options) -> Host:
        """`host` with its ProxyCommand, if it has one."""
        command = _given(options, "proxycommand")
        if not command:
            return host
        if _given(options, "proxyusefdpass") == "yes":
            raise HostsError(
                f"{host.name}: its ProxyCommand hands a socket over (ProxyUseFdpass yes), which burst does not take; "
                f"let the command carry the bytes itself"
            )
        # Only what the user's own configuration says is a command: names, which may come from elsewhere, are words.
        words = {"h": host.address, "n": host.name, "p": str(host.port), "r": host.user, "k": host.key_name}
        return replace(host, proxy_command=self._words(command, {k: shlex.quote(w) for k, w in words.items()}))

    def _paths(self, options: Options, key: str, words: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(self._path(text, words) for text in options.get(key, ()) if text != "none")

    def _known_hosts(self, options: Options) -> tuple[str, ...]:
        if self.ssh.known_hosts is not None:
            given = [self.ssh.known_hosts]
        else:
            lists = [*options.get("userknownhostsfile", ()), *options.get("globalknownhostsfile", ())]
            # Absolute paths, parted by spaces and not quoted.
            given = [path for text in lists for path in re.split(r" (?=[/~])", text)]
        paths = [self._path(path, {}) for path in given if path not in ("none", "/dev/null")]
        return tuple(dict.fromkeys((str(trust_file()), *paths)))

    def _timeout_s(self, options: Options) -> float:
        """That of cluster.ssh; where it has its default, ConnectTimeout of OpenSSH's configuration counts."""
        text = _given(options, "connecttimeout")
        if self.ssh.connect_timeout_s == _DEFAULT_TIMEOUT_S and text.isdecimal() and int(text) > 0:
            return float(text)
        return self.ssh.connect_timeout_s

    def _agent(self, options: Options, words: Mapping[str, str]) -> str:
        text = options.get("identityagent", ["SSH_AUTH_SOCK"])[0]
        if text == "SSH_AUTH_SOCK" or re.fullmatch(r"\$\w+", text):
            return os.environ.get(text.removeprefix("$"), "")
        return self._path(text, words) if text != "none" else ""

    def _own_key(self, text: str) -> str:
        path = self._path(text, {})
        if not Path(path).is_file():
            raise HostsError(f"cluster.ssh.identity_file={text}: no such file; expected a private key")
        return path

    def _path(self, text: str, words: Mapping[str, str]) -> str:
        """`text` with the home of this user and the %-words that file names may have in ssh_config."""
        text = _me()[1] + text[1:] if text == "~" or text.startswith("~/") else text
        text = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], found[0]), text)
        return str(Path(self._words(text, words)).expanduser())

    def _words(self, text: str, words: Mapping[str, str]) -> str:
        """`text` with its %-words filled in; those that are not known stay."""
        me = {"%": "%", "d": _me()[1], "u": _me()[0], "i": str(os.getuid()), "l": socket.gethostname(), **words}
        return re.sub(r"%(.)", lambda found: me.get(found[1], found[0]), text)


def _openssh(ssh: SshConfig) -> Sequence[str]:
    """See `Resolver`."""
    program = shutil.which("ssh")
    if program is None:
        raise HostsError("how nodes are reached is what `ssh` says, which is not installed; install openssh-client")
    if ssh.config_file is None:
        return [program]
    path = Path(ssh.config_file).expanduser()
    if not path.is_file():
        raise HostsError(f"cluster.ssh.config_file={ssh.config_file}: no such file; expected an OpenSSH configuration")
    return [program, "-F", str(path)]


def _ask(command: Sequence[str]) -> Options:
    name = command[-1]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        text = f"{name}: `ssh -G {name}` did not end within {_ASK_TIMEOUT_S:.0f} s; does a Match exec of your SSH"
        raise HostsError(f"{text} configuration hang?") from error
    if answer.returncode != 0:
        lines = answer.stderr.decode(errors="replace").splitlines()
        detail = one_line("; ".join(line for line in lines if "Pseudo-terminal" not in line))
        raise HostsError(f"your SSH configuration cannot be used: {detail or f'exit code {answer.returncode}'}")
    options: dict[str, list[str]] = {}
    for line in answer.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options


def _attempt(resolver: Resolver, name: str) -> Host | HostsError:
    try:
        return resolver.node(name)
    except HostsError as error:
        return error


def _login_words(user: str | None, port: int | str | None) -> list[str]:
    if user and not _USER.fullmatch(user):
        raise HostsError(f"{one_line(user)!r} cannot be a user")
    return [*(("-l", user) if user else ()), *(("-p", str(port)) if port else ())]


def _given(options: Options, key: str) -> str:
    """The first value; empty for none."""
    text = options.get(key, [""])[0]
    return "" if text == "none" else text


def _me() -> tuple[str, str]:
    """(name, home) of this user as OpenSSH has them: by the entry in passwd, whatever HOME says."""
    entry = pwd.getpwuid(os.getuid())
    return entry.pw_name, entry.pw_dir
