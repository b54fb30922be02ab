"""The code of the ranks as one archive, named by its content: equal sources give equal names and equal bytes.

Brings the code of the ranks to the nodes that lack it; where all share a folder, to the first one.
"""

from __future__ import annotations

import io
import secrets
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.agent.code import code_id_of
from cluster.code.program import NoAnswerError, ask_program
from cluster.errors import ClusterError
from cluster.remote_text import one_line
from cluster.ssh.connection import Connection
from cluster.ssh.hosts import Host, fan_out
from cluster.ssh.nodes import fold_nodes

_ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class CodeArchive:
    """code_id: see `cluster.agent.code`. data: a zip that Python imports from."""

    code_id: str
    data: bytes


class CodeError(ClusterError):
    """The code cannot be brought to a node."""


def build_archive(root: Path = _ROOT) -> CodeArchive:
    """The archive of the engine below `root`, this installation: what ranks import of us. No dates, no owners."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path in sorted((root / "engine").rglob("*.py")):
            member = zipfile.ZipInfo(path.relative_to(root).as_posix())
            archive.writestr(member, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return CodeArchive(code_id_of(stream.getvalue()), stream.getvalue())


KEEP = 5
_DAY_S = 86400.0
_SHARED_AGE_S = 30 * _DAY_S  # who else uses a shared folder cannot be seen from one node
_TIMEOUT_S = 120.0

Connect = Callable[[Host], Connection]


@dataclass(frozen=True)
class CodePlace:
    """Where the code of a run lies. root: the folder of all code on a node, which may begin with ~/. is_shared: all
    nodes see one folder there."""

    root: str
    is_shared: bool


def code_place(node_folder: str | None, shared_folder: str | None, user: str) -> CodePlace:
    """The place that the configuration means. user: tells users of a shared folder apart."""
    if shared_folder is not None:
        return CodePlace(shared_place(shared_folder, user, "code"), True)
    return CodePlace(f"{(node_folder or '~/.burst').rstrip('/')}/code", False)


def shared_place(shared_folder: str, user: str, what: str) -> str:
    """The folder of a user's `what` in the folder that all nodes share."""
    return f"{shared_folder.rstrip('/')}/.burst-{user}/{what}"


@dataclass(frozen=True)
class Delivery:
    """What nodes get. folders: more of them to be made, by node; containers mount them."""

    archive: CodeArchive
    place: CodePlace
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)


def upload_code(hosts: Sequence[Host], delivery: Delivery, connect: Connect) -> None:
    """Raises CodeError with all nodes that do not have it now."""
    first, others = (hosts[:1], hosts[1:]) if delivery.place.is_shared else (hosts, [])
    _on_all(first, delivery, connect)
    # Sharing is proven, not believed: every other node must see what the first one wrote.
    _on_all(others, replace(delivery, archive=CodeArchive(delivery.archive.code_id, b"")), connect)


def _on_all(hosts: Sequence[Host], delivery: Delivery, connect: Connect) -> None:
    def work(host: Host) -> None:
        with connect(host) as connection:
            _install(connection, delivery)

    outcomes = fan_out(hosts, work)
    failed: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if outcome.error is not None:
            failed.setdefault(_without_name(str(outcome.error), name), []).append(name)
    if failed:
        raise CodeError("\n".join(f"{fold_nodes(names)}: {text}" for text, names in failed.items()))


def _install(connection: Connection, delivery: Delivery) -> None:
    archive, place = delivery.archive, delivery.place
    question = {
        "folders": list(delivery.folders.get(connection.host.name, ())),
        "root": place.root,
        "code_id": archive.code_id,
        "nonce": secrets.token_hex(8),
        "keep": KEEP,
        "age_s": _SHARED_AGE_S if place.is_shared else _DAY_S,
    }
    name = connection.host.name
    try:
        answer = ask_program(connection, {"install": question}, archive.data, timeout_s=_TIMEOUT_S)
    except NoAnswerError as error:
        raise CodeError(f"{name}: cannot lay the code of the ranks: {error}") from error
    state = one_line(str(answer.get("state", "")), 300)
    if state != "good" and archive.data:
        raise CodeError(f"{name}: cannot lay the code of the ranks: {state}")
    if state != "good":
        text = f"{place.root} on it does not hold the code that the first node wrote there ({state})"
        raise CodeError(f"{name}: {text}; is cluster.shared_folder shared by all nodes?")


def _without_name(text: str, name: str) -> str:
    return text.removeprefix(f"{name}: ")
