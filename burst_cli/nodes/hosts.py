"""`burst hosts`: which nodes are meant, how each is reached, and whose host keys are trusted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.figures import DASH, count_of
from burst_cli.nodes.host_trust import TrustSession
from burst_cli.options import ConfigDirOption, JsonOption, OverridesArgument
from burst_cli.tables import listing
from burst_cli.targets import HostfileOption, HostsOption, select_targets
from cluster.errors import HostsError
from cluster.ssh.hosts import Host
from cluster.ssh.keys import HostKeys, forget_names, trust_file

app = new_verb()

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Trust every new key without asking.")]
FingerprintOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fingerprint",
        metavar="SHA256:...",
        help="Trust keys with this fingerprint only, without asking. May be repeated.",
    ),
]


@app.callback()
def _hosts() -> None:
    """List the nodes; trust or forget their host keys.

    The nodes are those of --hosts, --hostfile, cluster.nodes (cluster=NAME) or a Slurm allocation. How each is reached
    is what `ssh NODE` would do on this machine, with the settings under cluster.ssh on top.
    """


@app.command("list")
def list_hosts(
    overrides: OverridesArgument = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    config_dir: ConfigDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every node: address, port, user, jump hosts, and whether its host key is known. Connects to none.

    burst hosts list --hosts node[1-4]
    """
    targets = select_targets(overrides or [], config_dir or [], hosts=hosts, hostfile=hostfile)
    rows = _described(targets.hosts)
    if as_json:
        render.emit_json({"source": targets.source, "hosts": rows})
        return
    console = render.stdout()
    console.print(_host_table(rows))
    unknown = [row["name"] for row in rows if not row["keys"]]
    advice = f"; {len(unknown)} without a known host key: compare and accept with `burst hosts trust`"
    text = f"{count_of('node', len(rows))} from {targets.source}{advice if unknown else ''}"
    console.print(Text(text), soft_wrap=True)


@app.command("trust")
def trust_hosts(
    overrides: OverridesArgument = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    yes: YesOption = False,
    fingerprint: FingerprintOption = None,
    config_dir: ConfigDirOption = None,
    as_json: JsonOption = False,
) -> int:
    """Fetch the host keys of all nodes, show them, and remember those that you accept.

    Compare each fingerprint with what the node itself shows (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub): whoever
    answers for a node now will be believed from now on. A key that has changed is never replaced: `burst hosts forget`
    comes first. Exit code 1 when a node stays untrusted.

    burst hosts trust --hosts node[1-4]
    """
    wanted = frozenset(fingerprint or ())
    odd = [text for text in wanted if not text.startswith("SHA256:")]
    if odd:
        raise HostsError(f"--fingerprint {odd[0]}: expected SHA256:..., as ssh-keygen -lf FILE prints it")
    if yes and wanted:
        raise HostsError("--yes trusts every key and --fingerprint only some; give one of them")
    if not yes and not wanted and (as_json or not sys.stdin.isatty()):
        raise HostsError("nobody can be asked here; give --yes, or better --fingerprint SHA256:... for each key")
    targets = select_targets(overrides or [], config_dir or [], hosts=hosts, hostfile=hostfile)
    session = TrustSession(wanted=wanted, yes=yes, quiet=as_json)
    session.trust(targets.hosts)
    if as_json:
        render.emit_json({"source": targets.source, "file": str(trust_file()), "hosts": session.rows})
    return 0 if session.all_trusted else 1


@app.command("forget")
def forget_hosts(
    overrides: OverridesArgument = None,
    hosts: HostsOption = None,
    hostfile: HostfileOption = None,
    config_dir: ConfigDirOption = None,
    as_json: JsonOption = False,
) -> int:
    """Take the host keys of nodes out of what `burst hosts trust` remembers; other files are not touched.

    burst hosts forget --hosts node3
    """
    targets = select_targets(overrides or [], config_dir or [], hosts=hosts, hostfile=hostfile)
    own = HostKeys.load([str(trust_file())])
    forget_names([host.key_name for host in targets.hosts])
    after = {files: HostKeys.load(files) for files in {host.known_hosts for host in targets.hosts}}
    rows: list[dict[str, Any]] = []
    for host in targets.hosts:
        files = [key.file for key in after[host.known_hosts].find(host.key_name)]
        forgotten = len(own.find(host.key_name)) - files.count(str(trust_file()))
        rows.append({"name": host.name, "forgotten": forgotten, "still_known_in": sorted(set(files))})
    if as_json:
        render.emit_json({"file": str(trust_file()), "hosts": rows})
    else:
        _print_forgotten(rows, targets.hosts)
    return 0


def _print_forgotten(rows: Sequence[dict[str, Any]], hosts: Sequence[Host]) -> None:
    console = render.stdout()
    for row, host in zip(rows, hosts, strict=True):
        forgotten = row["forgotten"]
        text = f"{row['name']}: {count_of('key', forgotten) + ' forgotten' if forgotten else 'was not remembered'}"
        for file in row["still_known_in"]:
            text += f"; still known in {file}: ssh-keygen -R {quote(host.key_name)} -f {quote(file)}"
        console.print(Text(text), soft_wrap=True)


def _described(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """How each host is reached, as plain values; `keys` are those that are trusted for it, authorities last."""
    known = {files: HostKeys.load(files) for files in {host.known_hosts for host in hosts}}
    return [_describe(host, known[host.known_hosts]) for host in hosts]


def _describe(host: Host, known: HostKeys) -> dict[str, Any]:
    lines = [*known.find(host.key_name), *known.authorities(host)]
    return {
        "name": host.name,
        "address": host.address,
        "port": host.port,
        "user": host.user,
        "jump": [f"{gate.user}@{gate.address}:{gate.port}" for gate in host.way],
        "proxy_command": (*host.way, host)[0].proxy_command,
        "identity_files": list(host.identity_files),
        "key_name": host.key_name,
        "keys": [
            {"type": f"{line.marker} {line.key.kind}".strip(), "fingerprint": line.key.fingerprint, "file": line.file}
            for line in lines
        ],
    }


def _host_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per host of `_described`."""
    headings = ("node", "address", "port", "user", "through", "host key", "known in")
    return listing(headings, map(_host_cells, rows), ["port"])


def _host_cells(row: Mapping[str, Any]) -> tuple[str | Text, ...]:
    keys, through = row["keys"], ", ".join([*filter(None, [row["proxy_command"]]), *row["jump"]]) or DASH
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    shown = f"{keys[0]['type']} {keys[0]['fingerprint']}{more}" if keys else Text("unknown", "yellow")
    file = keys[0]["file"] if keys else DASH
    return row["name"], row["address"], str(row["port"]), row["user"], through, shown, file
