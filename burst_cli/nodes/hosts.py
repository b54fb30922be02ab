"""`burst hosts`: which nodes are meant, how each is reached, and whose host keys are trusted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Annotated, Any

import typer
from rich.text import Text

from burst_cli import render
from burst_cli.app import new_verb
from burst_cli.options import JsonOption, NodeOptions
from burst_cli.render import listing
from cluster.errors import HostsError
from cluster.ssh.hosts import Host, Outcome, fan_out, trust_file
from cluster.ssh.session import SshPool
from cluster.ssh.transport import HostKeys, ShownKey, add_keys, clear_names
from engine.runs.figures import DASH, count_of

_STYLES = {"known": "green", "new": "yellow"}
_HEADINGS = ("node", "address", "port", "user", "through", "host key", "known in")
app = new_verb()


@app.callback()
def _hosts() -> None:
    """List the nodes; trust or forget their host keys.

    The nodes are those of --hosts, --hostfile, cluster.nodes (cluster=NAME) or a Slurm allocation. How each is reached
    is what `ssh NODE` would do on this machine, with the settings under cluster.ssh on top.
    """


@app.command("list")
def list_hosts(nodes: NodeOptions, as_json: JsonOption = False) -> None:
    """Show every node: address, port, user, jump hosts, and whether its host key is known. Connects to none.

    burst hosts list --hosts node[1-4]
    """
    targets = nodes.select()
    known = _known_keys(targets.hosts)
    rows = [_describe(host, known[host.known_hosts]) for host in targets.hosts]
    unknown = sum(not row["keys"] for row in rows)
    advice = f"; {unknown} without a known host key: compare and accept with `burst hosts trust`" if unknown else ""
    table = listing(_HEADINGS, map(_cells, rows), ["port"])
    summary = f"{count_of('node', len(rows))} from {targets.source}{advice}"
    render.show({"source": targets.source, "hosts": rows}, table, summary, as_json=as_json)


@app.command("trust")
def trust_hosts(
    nodes: NodeOptions,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Trust every new key without asking.")] = False,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHA256:...", help="Trust keys with this fingerprint only, without asking. May be repeated."
        ),
    ] = None,
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
    is_requested = not yes and not wanted
    if is_requested and (as_json or not sys.stdin.isatty()):
        raise HostsError("nobody can be asked here; give --yes, or better --fingerprint SHA256:... for each key")
    targets = nodes.select()
    rows: list[dict[str, Any]] = []
    for level in _by_depth(targets.hosts):  # keys of jump hosts decide who is asked next
        rows += _trust(level, wanted, is_requested=is_requested, quiet=as_json)
    if as_json:
        render.emit_json({"source": targets.source, "file": str(trust_file()), "hosts": rows})
    return 0 if all(row["trusted"] for row in rows) else 1


@app.command("forget")
def remove_hosts(nodes: NodeOptions, as_json: JsonOption = False) -> None:
    """Take the host keys of nodes out of what `burst hosts trust` remembers; other files are not touched.

    burst hosts forget --hosts node3
    """
    hosts = nodes.select().hosts
    own = HostKeys.load([str(trust_file())])
    clear_names([host.key_name for host in hosts])
    after = _known_keys(hosts)
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for host in hosts:
        files = [key.file for key in after[host.known_hosts].find(host.key_name)]
        forgotten, left = len(own.find(host.key_name)) - files.count(str(trust_file())), sorted(set(files))
        rows.append({"name": host.name, "forgotten": forgotten, "still_known_in": left})
        told = f"{count_of('key', forgotten)} forgotten" if forgotten else "was not remembered"
        commands = (f"still known in {file}: ssh-keygen -R {quote(host.key_name)} -f {quote(file)}" for file in left)
        lines.append("; ".join([f"{host.name}: {told}", *commands]))
    render.show({"file": str(trust_file()), "hosts": rows}, *lines, as_json=as_json)


def _trust(hosts: Sequence[Host], wanted: frozenset[str], *, is_requested: bool, quiet: bool) -> list[dict[str, Any]]:
    """What came of each of `hosts`, after new keys were shown and remembered: those `wanted`, or all if so accepted.

    quiet: nothing goes to stdout.
    """
    with SshPool() as pool:
        answers = list(fan_out(hosts, pool.show_key).values())
    shown = [answer.value for answer in answers if answer.value is not None]
    if shown and not quiet:
        cells = ((key.host.name, key.key.kind, key.key.fingerprint, _state(key)) for key in shown)
        render.stdout().print(listing(("node", "type", "fingerprint", "state"), cells))
    render.say(render.stderr(), *filter(None, (_problem(answer, wanted) for answer in answers)))
    accepted = [key for key in shown if key.state == "new" and (not wanted or key.key.fingerprint in wanted)]
    if accepted and is_requested:
        whom = "this host" if len(accepted) == 1 else f"these {len(accepted)} hosts"
        accepted = accepted if typer.confirm(f"Trust {whom} from now on?", err=True) else []
    add_keys(accepted)
    if accepted and not quiet:
        render.say(render.stdout(), f"{count_of('key', len(accepted))} added to {trust_file()}")
    return [_row(answer, accepted) for answer in answers]


def _problem(answer: Outcome[ShownKey], wanted: frozenset[str]) -> Text | None:
    """What keeps a host from being trusted."""
    key = answer.value
    if key is None:
        return render.told("error", str(answer.error))
    if key.state in ("changed", "revoked"):
        return render.told(
            "warning",
            f"{key.host.name}: shows a key that contradicts what is known. Either the node was installed anew, or "
            f"somebody answers in its place. When you are sure of the first: `{key.host.command('hosts', 'forget')}`",
        )
    if key.state == "new" and wanted and key.key.fingerprint not in wanted:
        text = f"{key.host.name}: shows none of the fingerprints that were given; it stays untrusted"
        return render.told("warning", text)
    return None


def _row(answer: Outcome[ShownKey], accepted: Sequence[ShownKey]) -> dict[str, Any]:
    """What came of one host, as plain values."""
    key, host = answer.value, answer.host
    state = None if key is None else "added" if key in accepted else key.state
    keys = [] if key is None else [{"type": key.key.kind, "fingerprint": key.key.fingerprint, "state": state}]
    error = None if answer.error is None else str(answer.error)
    is_trusted = state in ("known", "added")
    return {"name": host.name, "key_name": host.key_name, "trusted": is_trusted, "keys": keys, "error": error}


def _state(key: ShownKey) -> Text:
    return Text(key.state, _STYLES.get(key.state, "bold red"))


def _by_depth(hosts: Sequence[Host]) -> list[list[Host]]:
    """Hosts and the jump hosts before them, each once, by the number of jumps to get there."""
    levels: dict[int, dict[Host, None]] = {}
    for host in hosts:
        for depth, step in enumerate((*host.way, host)):
            levels.setdefault(depth, {})[step] = None
    return [list(levels[depth]) for depth in sorted(levels)]


def _known_keys(hosts: Sequence[Host]) -> dict[tuple[str, ...], HostKeys]:
    return {files: HostKeys.load(files) for files in {host.known_hosts for host in hosts}}


def _describe(host: Host, known: HostKeys) -> dict[str, Any]:
    """How a host is reached, as plain values; `keys` are those that are trusted for it, authorities last."""
    lines = [*known.find(host.key_name), *known.authorities(host)]
    return {
        **{name: getattr(host, name) for name in ("name", "address", "port", "user", "key_name")},
        "jump": [f"{gate.user}@{gate.address}:{gate.port}" for gate in host.way],
        "proxy_command": (*host.way, host)[0].proxy_command,
        "identity_files": list(host.identity_files),
        "keys": [
            {"type": f"{line.marker} {line.key.kind}".strip(), "fingerprint": line.key.fingerprint, "file": line.file}
            for line in lines
        ],
    }


def _cells(row: Mapping[str, Any]) -> tuple[str | Text, ...]:
    keys, through = row["keys"], ", ".join([*filter(None, [row["proxy_command"]]), *row["jump"]]) or DASH
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    shown = f"{keys[0]['type']} {keys[0]['fingerprint']}{more}" if keys else Text("unknown", "yellow")
    file = keys[0]["file"] if keys else DASH
    return row["name"], row["address"], str(row["port"]), row["user"], through, shown, file
