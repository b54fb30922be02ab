"""Names of nodes, the hosts that they stand for, and work on many of them at once. Nothing here connects.

Names, wherever somebody lists them (an option, a hostfile, the configuration, Slurm's environment), use ClusterShell's
NodeSet grammar: `node[1-4,7]`, `node[1-9]!node3`, `rack[1-2]n[01-16]`. Group names (`@all`) are refused: what they mean
depends on files of this machine that burst knows nothing of.

OpenSSH is asked what `ssh NAME` would do (`ssh -G`), settings of `cluster.ssh` come on top: paramiko's own reader of
ssh_config knows neither Include nor Match nor ProxyJump, and a node that `ssh` reaches must be reached here, too.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import pwd
import queue
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from cluster.errors import HostsError
from cluster.remote_text import one_line
from engine.config.cluster import ClusterConfig, SshConfig
from engine.config.errors import BurstError

T = TypeVar("T")
DEFAULT_WIDTH = 64

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


@dataclass(frozen=True)
class Host:
    """One node.

    name: what people and reports call it. address: what the socket connects to (a name or an IP address).
    key_name: under which known_hosts lists its key (`[address]:port` where port is not 22).
    identity_files, certificate_files: private keys to offer, certificates of them. known_hosts: files with trusted
    keys; only these count.
    jump: the host to go through. proxy_command: instead of a socket, what a shell runs (OpenSSH's ProxyCommand, its
    %-words filled in). identities_only: of the agent's keys offer those that identity_files name, too.
    agent_socket: of the SSH agent; empty: none. overrides: what was typed, see `node_command`.
    python: of the node, for what burst itself runs there where python3 is missing or too old; None: there is no other.
    """

    name: str
    address: str
    port: int = 22
    user: str = "root"
    key_name: str = ""
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()
    jump: Host | None = None
    proxy_command: str | None = None
    connect_timeout_s: float = 10.0
    identities_only: bool = False
    agent_socket: str = ""
    overrides: tuple[str, ...] = ()
    python: str | None = None

    @property
    def way(self) -> tuple[Host, ...]:
        """The jump hosts before it, the outermost first."""
        return (*self.jump.way, self.jump) if self.jump is not None else ()

    def command(self, *verb: str) -> str:
        """`burst VERB` for this node, as one types it."""
        return node_command(self.name, *verb, overrides=self.overrides)


def node_command(node: str, *verb: str, overrides: Iterable[str]) -> str:
    """`burst VERB` for a node, as one types it, with those of `overrides` that say how nodes are reached."""
    words = [word for word in overrides if word.startswith(("cluster=", "cluster.ssh."))]
    return shlex.join(["burst", *verb, *words, "--hosts", node])


def is_host_name(text: str) -> bool:
    """Whether `text` may name a host: letters, digits and `_ . -`, never starting with a dash, or an IPv6 address."""
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        return not ipaddress.IPv6Address(text).scope_id
    except ValueError:
        return False


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of one host: `value`, or the error that says why there is none."""

    host: Host
    value: T | None
    error: BurstError | None
    elapsed_s: float


def fan_out(
    hosts: Sequence[Host],
    work: Callable[[Host], T],
    *,
    width: int = DEFAULT_WIDTH,
    on_outcome: Callable[[Outcome[T]], None] = lambda outcome: None,
) -> dict[str, Outcome[T]]:
    """The outcome of `work(host)` by host name, in the order of `hosts`; at most `width` run at the same time.

    `on_outcome` is told of every outcome as it comes, in this thread. A BurstError of one host is its outcome; any
    other exception is a bug and is raised. Every `work` must end by its own timeouts: threads cannot be killed. After
    an interrupt nothing more begins, and what runs does not hold the process: its threads are daemons.
    """
    waiting, done = deque(hosts), queue.SimpleQueue[Outcome[T] | BaseException]()

    def attempt(host: Host) -> Outcome[T] | BaseException:
        begin, value, error = time.monotonic(), None, None
        try:
            value = work(host)
        except BurstError as failure:
            error = failure
        except BaseException as bug:
            return bug
        return Outcome(host, value, error, time.monotonic() - begin)

    def serve() -> None:
        with contextlib.suppress(IndexError):  # none is left
            while True:
                done.put(attempt(waiting.popleft()))

    found: dict[str, Outcome[T]] = {}
    try:
        for number in range(min(max(1, width), len(hosts))):
            threading.Thread(target=serve, name=f"fan-out {number}", daemon=True).start()
        for _ in hosts:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            found[outcome.host.name] = outcome
            on_outcome(outcome)
    finally:
        waiting.clear()
    return {host.name: found[host.name] for host in hosts}


MAX_NODES = 16384
_SLURM_NODES = "SLURM_JOB_NODELIST"
# An entry of a hostfile. What MPI launchers allow after a name says how many ranks a node takes, which is
# cluster.ranks_per_node here.
_ENTRY = re.compile(r"(\S+)(\s+(slots|max[-_]slots)=\d+)*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")


@dataclass(frozen=True)
class NodeList:
    """Names without duplicates, and where they came from, in words."""

    names: tuple[str, ...]
    source: str


def parse_nodes(text: str, source: str) -> NodeList:
    """The nodes that `text` names, in the order of NodeSet (by name, then by number). Raises HostsError.

    `source` says in messages where the text was given.
    """
    where = f"{source}: {one_line(text)!r}"
    if not text.strip():
        raise HostsError(f"{source}: no node is named; expected names such as node1 or node[1-4]")
    if "@" in text:
        raise HostsError(
            f"{where}: groups (@NAME) are not known here, and a login is set by cluster.ssh.user=NAME; "
            f"expected names of nodes, such as node[1-4]"
        )
    for pattern in re.split(r"[,&!^\s]+(?![^\[]*\])", text):
        # Before NodeSet makes the names: it holds every one of them in memory.
        spans = (
            sum(int(last) - int(first) + 1 for first, last in _RANGE.findall(ranges))
            for ranges in _BRACKETS.findall(pattern)
        )
        if (count := math.prod(max(1, span) for span in spans)) > MAX_NODES:
            raise HostsError(f"{where}: about {count} nodes, more than the {MAX_NODES} that burst handles")
    try:
        names = tuple(map(str, NodeSet(text, resolver=RESOLVER_NOGROUP)))
    except (NodeSetException, AssertionError, ValueError) as error:
        said = one_line(str(error))
        raise HostsError(f"{where}: not in the grammar of node lists ({said}); expected such as node[1-4,7]") from error
    for name in names:
        if not is_host_name(name):
            text = "expected letters, digits and . _ - with no dash in front; a port is set by cluster.ssh.port=N"
            raise HostsError(f"{where}: {one_line(name)!r} is no host name; {text} or in your SSH configuration")
    if not 0 < len(names) <= MAX_NODES:
        raise HostsError(f"{where}: {len(names)} nodes; expected at least one and at most {MAX_NODES}")
    return NodeList(names, source)


def read_hostfile(path: Path) -> NodeList:
    """The nodes of a hostfile in its order: one entry per line, in NodeSet grammar; `#` begins a comment."""
    source = f"hostfile {path}"
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise HostsError(f"{source}: {error.strerror or error}; expected a file with one node per line") from error
    found: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (given := line.partition("#")[0].strip()):
            continue
        entry = _ENTRY.fullmatch(given)
        if entry is None:
            told = one_line(given)
            raise HostsError(f"{source}, line {number}: {told!r}: expected one entry per line, at most with slots=N")
        found.update(dict.fromkeys(parse_nodes(entry[1], f"{source}, line {number}").names))
    if not found:
        raise HostsError(f"{source}: names no node; expected one name per line, such as node1 or node[1-4]")
    return NodeList(tuple(found), source)


def slurm_nodes(environment: Mapping[str, str]) -> NodeList | None:
    """The nodes of the Slurm allocation that this process runs in; None outside of one."""
    text = environment.get(_SLURM_NODES)
    return parse_nodes(text, f"Slurm ({_SLURM_NODES})") if text else None


def fold_nodes(names: Iterable[str]) -> str:
    """`names` in short: `node[1-3,7]`."""
    return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))


Options = Mapping[str, Sequence[str]]  # what `ssh -G` says: values in order by keys in small letters

MAX_JUMPS = 8
_ASK_TIMEOUT_S = 15.0
_DEFAULT_TIMEOUT_S = SshConfig().connect_timeout_s
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@\s]+)@)?\[?(?P<name>[^@\s\]]+?)\]?(?::(?P<port>\d+))?/?")
# For what goes through a log-in of `ssh` that is open to others; should it end meanwhile, ssh makes one of its own.
_SHARING = ("-o", "ControlMaster=no", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes")


def resolve_hosts(names: Sequence[str], cluster: ClusterConfig, overrides: Iterable[str] = ()) -> tuple[Host, ...]:
    """The hosts that `names` stand for, in order. Raises HostsError for one that cannot be reached so.

    overrides: what was typed, for the commands that errors tell to type.
    One `ssh -G` per name takes 5 ms; a few run at the same time.
    """
    resolver, typed = Resolver(cluster.ssh, _openssh(cluster.ssh)), tuple(overrides)
    python = cluster.python if cluster.container.runtime == "bare" else None  # else it is that of the image
    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(lambda name: replace(resolver.node(name), overrides=typed, python=python), names))


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


def trust_file() -> Path:
    """burst's own known_hosts: ~/.config/burst/known_hosts, or below XDG_CONFIG_HOME."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "burst" / "known_hosts"


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
