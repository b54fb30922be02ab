"""plan.sh of a launch over SSH: what `burst launch` does, as one shell script for OpenSSH, tar and sh on the nodes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.access.hosts import Host
from cluster.access.nodes import fold_nodes
from engine.config_cluster import SshConfig

if TYPE_CHECKING:
    from cluster.plan import NodePlan

_HELPERS = """\
remote() { # NODE: run there what stdin says
    login "$1" sh -s
}
run_node() { # NODE: likewise, and leave its exit code in $work/NODE
    status=0
    remote "$1" || status=$?
    echo "$status" >"$work/.$1" && mv "$work/.$1" "$work/$1"
}
stop_all() { # both marks must be there: virtual nodes share one process table
    for node in $nodes; do
        { echo "node=$node run_id=$run_id"; cat <<'END_OF_SCRIPT'
for process in /proc/[0-9]*; do
    marks=$(tr '\\0' '\\n' 2>/dev/null <"$process/environ" | grep -cxF -e "BURST_RUN_ID=$run_id" -e "BURST_NODE=$node")
    [ "$marks" != 2 ] || kill -TERM "${process#/proc/}" 2>/dev/null
done
END_OF_SCRIPT
        } | remote "$node" 2>/dev/null || true
    done
}
interrupted() { # whoever is just being asked to begin is only there at a later look; a second signal leaves at once
    trap 'exit 130' INT TERM HUP
    looks=30
    while [ "$looks" -gt 0 ]; do
        stop_all
        open=
        for node in $begun; do
            [ -f "$work/$node" ] || open="$open $node"
        done
        [ -n "$open" ] || exit 130
        sleep 1
        looks=$((looks - 1))
    done
    echo "ranks may still run on:$open" >&2
    exit 130
}
begun=
trap 'rm -rf "$work"' EXIT
trap interrupted INT TERM HUP
"""
_WAIT = """\
code=0
left=$nodes
while [ -n "$left" ]; do
    sleep 1
    open=
    for node in $left; do
        if [ ! -f "$work/$node" ]; then
            open="$open $node"
        elif [ "$code" -eq 0 ]; then
            code=$(cat "$work/$node")
            [ "$code" -eq 0 ] || { echo "$node ended with $code; stopping the others" >&2; stop_all; }
        fi
    done
    left=$open
done
"""
_LEAD_FILES = ("run.json", "metrics.jsonl", "events.jsonl", "summary.json")


@dataclass(frozen=True)
class ScriptNode:
    """A node of the script. login: OpenSSH's command line, its name last. code: folder of the ranks' code there."""

    plan: NodePlan
    login: tuple[str, ...]
    code: str


@dataclass(frozen=True)
class ScriptRequest:
    """What the script lays and starts. files: by name relative to the run folder; env/<node>.env goes to its node
    alone. archive: where the code of the ranks lies on this machine."""

    run_path: str
    run_id: str
    nodes: tuple[ScriptNode, ...]
    files: Mapping[str, str]
    archive: str


def ssh_script(request: ScriptRequest) -> str:
    """The text of plan.sh. Environment values stand in here-documents only, never in a command line."""
    ranks = sum(node.plan.local_ranks for node in request.nodes)
    names = [node.plan.name for node in request.nodes]
    lines = [
        "#!/bin/sh",
        f"# Run {request.run_id}: starts {ranks} ranks on {fold_nodes(names)}, waits, brings back what they wrote.",
        "# It does what `burst launch` does, but nobody checks the nodes before and watches the ranks meanwhile.",
        "set -eu",
        "umask 077",
        f"run={shlex.quote(request.run_path)} run_id={request.run_id}",
        f"archive={shlex.quote(request.archive)}",
        f"nodes={shlex.quote(' '.join(names))}",
        "work=$(mktemp -d)",
        "",
        *_login(request.nodes),
        *_HELPERS.splitlines(),
        "",
        "config_yaml() {",
        *here_document("cat", request.files["config.yaml"]),
        "}",
        'mkdir -p "$run/logs"',
        '[ -e "$run/config.yaml" ] || config_yaml >"$run/config.yaml"',
        "",
        "# The code of the ranks where it is missing, and the folder of the run; on all nodes at the same time.",
        "pids=",
        *(line for node in request.nodes for line in _lay(node, request)),
        'for pid in $pids; do wait "$pid"; done',
        "",
        "# One torchrun per node.",
        *(line for node in request.nodes for line in _start(node.plan)),
        "",
        *_WAIT.splitlines(),
        "",
        "# What they wrote.",
        *(line for node in request.nodes for line in _fetch(node.plan)),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def openssh_command(host: Host, ssh: SshConfig) -> tuple[str, ...]:
    """OpenSSH's command line that reaches `host` as burst does: with its settings and the keys that it trusts."""
    options = [*(("-F", ssh.config_file) if ssh.config_file is not None else ())]
    known = " ".join(f'"{path}"' for path in host.known_hosts)
    settings = ("BatchMode=yes", "StrictHostKeyChecking=yes", f"ConnectTimeout={max(1, round(host.connect_timeout_s))}")
    for setting in (*settings, *((f"UserKnownHostsFile={known}",) if known else ())):
        options += ["-o", setting]
    for flag, value in (("-l", ssh.user), ("-p", ssh.port), ("-i", ssh.identity_file), ("-J", ssh.jump)):
        options += [flag, str(value)] if value is not None else []
    return ("ssh", *options, "--", host.name)


def here_document(command: str, text: str, then: str = "") -> Iterator[str]:
    """Lines of shell that give `text`, word for word, to `command` as its input; `then`: the end of its first line."""
    end = "END_OF_FILE"
    while re.search(rf"^{end}$", text, re.MULTILINE):
        end += "_"
    yield f"{command} <<'{end}'{then}"
    yield from text.removesuffix("\n").split("\n")
    yield end


def _login(nodes: Sequence[ScriptNode]) -> Iterator[str]:
    """The function that reaches a node; a table of them only where their options differ."""
    yield "login() { # NODE COMMAND: run it there, with our stdin"
    options = {node.login[:-1] for node in nodes}
    if len(options) == 1:
        yield f'    {shlex.join(options.pop())} "$@"'
    else:
        yield "    case $1 in"
        for node in nodes:
            yield f'    {node.plan.name}) {shlex.join(node.login[:-1])} "$@" ;;'
        yield "    esac"
    yield "}"


def _lay(node: ScriptNode, request: ScriptRequest) -> Iterator[str]:
    """The code, if it is missing, and the files of the run's folder there."""
    plan, name = node.plan, node.plan.name
    folder, code = shlex.quote(plan.folder), shlex.quote(node.code)
    part = shlex.quote(f"{node.code}.part-{request.run_id}-{name}")
    unpack = f"umask 077; mkdir -p {part} && tar -xzf - -C {part} && "
    unpack += f"{{ mv -T {part} {code} || {{ rm -rf {part}; test -d {code}; }}; }}"  # another node may share the folder
    make = f"umask 077; mkdir -p {folder}/env {folder}/checkpoints {shlex.quote(plan.log_dir)}"
    put = f"umask 077; cat >{folder}/{shlex.quote(plan.env_file)}"
    yield "{"
    yield f"if ! login {name} {shlex.quote(f'test -d {code}')} </dev/null; then"
    yield '    [ -f "$archive" ] || { echo "no $archive: burst launch leaves it there" >&2; exit 1; }'
    yield f'    login {name} {shlex.quote(unpack)} <"$archive"'
    yield "fi"
    yield f"config_yaml | login {name} {shlex.quote(f'{make} && cat >{folder}/config.yaml')}"
    yield from here_document(f"login {name} {shlex.quote(put)}", request.files[plan.env_file])
    yield "} &"
    yield 'pids="$pids $!"'


def _start(plan: NodePlan) -> Iterator[str]:
    lines = [f"cd {shlex.quote(plan.cwd)} || exit 1"]
    if plan.container is None:  # else the engine reads the file itself
        lines += ["set -a", f". {shlex.quote(f'{plan.folder}/{plan.env_file}')}", "set +a"]
    log = shlex.quote(f"{plan.log_dir}/torchrun.log")
    lines.append(f"exec {shlex.join(plan.argv)} </dev/null >>{log} 2>&1")
    yield f'begun="$begun {plan.name}"'
    yield from here_document(f"run_node {plan.name}", "\n".join(lines), " &")


def _fetch(plan: NodePlan) -> Iterator[str]:
    logs = f"logs/{plan.log_dir.rsplit('/', 1)[-1]}"
    names = (*(_LEAD_FILES if plan.node_rank == 0 else ()), logs)
    lines = [
        f"cd {shlex.quote(plan.folder)} || exit 1",
        f"tar -cf - --exclude={logs}/torchrun $(ls -d {' '.join(names)} 2>/dev/null)",
    ]
    yield from here_document(f"remote {plan.name}", "\n".join(lines), ' | tar -xf - -C "$run"')
