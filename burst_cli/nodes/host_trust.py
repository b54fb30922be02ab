"""What `burst hosts trust` does: fetch keys of many hosts at once, ask once, remember what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from burst_cli import render
from burst_cli.figures import count_of
from burst_cli.tables import listing
from cluster.ssh.hosts import Host, Outcome, fan_out
from cluster.ssh.keys import ShownKey, add_keys, trust_file
from cluster.ssh.pool import SshPool

_STYLES = {"known": "green", "new": "yellow"}


@dataclass
class TrustSession:
    """One call of the verb. wanted: fingerprints that may be trusted; empty: all, if `yes` or the person says so.

    rows: what came of each host, jump hosts first. quiet: print nothing on stdout.
    """

    wanted: frozenset[str]
    yes: bool
    quiet: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def all_trusted(self) -> bool:
        """Whether every host shows a key that is trusted now."""
        return all(row["trusted"] for row in self.rows)

    def trust(self, hosts: Sequence[Host]) -> None:
        """Go through `hosts`, the jump hosts before what lies behind them: their keys decide who is asked next."""
        for level in _by_depth(hosts):
            with SshPool() as pool:
                answers = fan_out(level, pool.show_key)
            self._settle(list(answers.values()))

    def _settle(self, answers: Sequence[Outcome[ShownKey]]) -> None:
        shown = [answer.value for answer in answers if answer.value is not None]
        fresh = [key for key in shown if key.state == "new" and (not self.wanted or key.key.fingerprint in self.wanted)]
        self._show(answers, shown)
        accepted = fresh if fresh and self._accept(fresh) else []
        add_keys(accepted)
        self.rows += [_row(answer, accepted) for answer in answers]
        if not self.quiet and accepted:
            text = f"{count_of('key', len(accepted))} added to {trust_file()}"
            render.stdout().print(Text(text), soft_wrap=True)

    def _show(self, answers: Sequence[Outcome[ShownKey]], shown: Sequence[ShownKey]) -> None:
        console = render.stderr()
        if not self.quiet and shown:
            render.stdout().print(_key_table(shown))
        for answer in answers:
            if answer.error is not None:
                console.print(render.told("error", str(answer.error)), soft_wrap=True)
        for key in shown:
            if key.state in ("changed", "revoked"):
                text = (
                    f"{key.host.name}: shows a key that contradicts what is known. Either the node was installed anew, "
                    f"or somebody answers in its place. When you are sure of the first: "
                    f"`{key.host.command('hosts', 'forget')}`"
                )
                console.print(render.told("warning", text), soft_wrap=True)
            if key.state == "new" and self.wanted and key.key.fingerprint not in self.wanted:
                text = f"{key.host.name}: shows none of the fingerprints that were given; it stays untrusted"
                console.print(render.told("warning", text), soft_wrap=True)

    def _accept(self, keys: Sequence[ShownKey]) -> bool:
        if self.yes or self.wanted:
            return True
        count = len({key.host.name for key in keys})
        question = f"Trust {'this host' if count == 1 else f'these {count} hosts'} from now on?"
        return typer.confirm(question, err=True)


def _by_depth(hosts: Sequence[Host]) -> list[list[Host]]:
    """Hosts and the jump hosts before them, each once, by the number of jumps to get there."""
    levels: dict[int, dict[Host, None]] = {}
    for host in hosts:
        for depth, step in enumerate((*host.way, host)):
            levels.setdefault(depth, {})[step] = None
    return [list(levels[depth]) for depth in sorted(levels)]


def _row(answer: Outcome[ShownKey], accepted: Sequence[ShownKey]) -> dict[str, Any]:
    """What came of one host, as plain values."""
    keys = []
    if (key := answer.value) is not None:
        state = "added" if key in accepted else key.state
        keys = [{"type": key.key.kind, "fingerprint": key.key.fingerprint, "state": state}]
    return {
        "name": answer.host.name,
        "key_name": answer.host.key_name,
        "trusted": any(one["state"] in ("known", "added") for one in keys),
        "keys": keys,
        "error": str(answer.error) if answer.error is not None else None,
    }


def _key_table(keys: Sequence[ShownKey]) -> Table:
    """One line per key that a server showed."""
    rows = (
        (
            shown.host.name,
            shown.key.kind,
            shown.key.fingerprint,
            Text(shown.state, _STYLES.get(shown.state, "bold red")),
        )
        for shown in keys
    )
    return listing(("node", "type", "fingerprint", "state"), rows)
