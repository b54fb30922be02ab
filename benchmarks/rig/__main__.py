"""Rehearse a fleet's network on one machine (Linux, root, iproute2).

    python -m benchmarks.rig up                        2 nodes x 4 ranks, one rail of 200 Mbit/s per rank
    python -m benchmarks.rig verify                    raw TCP throughput inside a node, of a rail, of all rails at once
    python -m benchmarks.rig bench attention --seq-lens 4096,8192 --json > FILE.json
    python -m benchmarks.rig down                      also after a crash; removes namespaces by their prefix

`bench` takes the options of `burst bench` (`bench linear`: of benchmarks.bench_linear), sets --ranks, --nodes and
--rank-command, builds the rig when there is none and leaves it up. Exit code 2: this machine cannot carry the rig (the
reason is printed).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rig.network import NODE_INTERFACE, PREFIX, Command, Rig, namespace

STATE = Path(tempfile.gettempdir()) / f"{PREFIX}-rig.json"  # what stands; the namespaces themselves are the truth
_PROBE_S = 2.0


class RigError(Exception):
    """This machine cannot carry the rig, or there is none."""


def main(argv: Sequence[str]) -> int:
    """The exit code of one command."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.rig", description=__doc__, formatter_class=_Formatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=("up", "verify", "bench", "down"))
    parser.add_argument("--rig-nodes", type=int, default=2, help="nodes")
    parser.add_argument("--rig-local-ranks", type=int, default=4, help="ranks per node")
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s of every rank's rail, each way")
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        check_machine()
        rig = Rig(args.rig_nodes, args.rig_local_ranks, args.rate)
        if args.command == "down":
            print(f"removed {tear_down()} namespaces")
        elif args.command == "up":
            build(rig)
            print(f"{rig.nodes} nodes x {rig.local_ranks} ranks, {rig.rate_mbit} Mbit/s per rail")
        elif args.command == "verify":
            verify(standing_rig())
        else:
            return bench(ensure(rig), rest)
    except (RigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def check_machine() -> None:
    """Raise RigError unless this process may make namespaces with the tools it needs."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        raise RigError(f"the rig needs Linux with iproute2; missing here: {', '.join(missing) or 'Linux'}")
    if os.geteuid() != 0:
        raise RigError("the rig needs root (network namespaces and traffic shaping); run it with sudo")


def build(rig: Rig) -> None:
    """Build the rig in the place of any that stands; nothing is left when a command fails."""
    tear_down()
    for command in rig.commands():
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            tear_down()
            raise RigError(
                f"{' '.join(command)}: {result.stderr.strip() or result.returncode}; nothing was left behind"
            )
    STATE.write_text(json.dumps({"nodes": rig.nodes, "local_ranks": rig.local_ranks, "rate_mbit": rig.rate_mbit}))


def tear_down() -> int:
    """Kill what runs in namespaces with the prefix and remove them; how many there were. Idempotent."""
    names = standing_namespaces()
    for name in names:
        # Before the namespace goes: afterwards its processes cannot be found.
        for pid in _output("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(("ip", "netns", "delete", name), capture_output=True)
    STATE.unlink(missing_ok=True)
    return len(names)


def standing_namespaces() -> list[str]:
    """Namespaces that belong to a rig."""
    lines = _output("ip", "netns", "list").splitlines()
    return [name for name in (line.split()[0] for line in lines if line.strip()) if name.startswith(PREFIX)]


def standing_rig() -> Rig:
    """The rig that stands; RigError when there is none."""
    try:
        rig = Rig(**json.loads(STATE.read_text()))
    except (OSError, ValueError, TypeError):
        rig = None
    if rig is None or {namespace(rank) for rank in range(rig.ranks)} - set(standing_namespaces()):
        raise RigError("no rig stands here; build one with: python -m benchmarks.rig up")
    return rig


def ensure(rig: Rig) -> Rig:
    """`rig`, built unless the same one stands already."""
    with contextlib.suppress(RigError):
        if standing_rig() == rig:
            return rig
    build(rig)
    return rig


def verify(rig: Rig) -> None:
    """Print the raw throughput of every kind of link; RigError when a rail is not shaped as it should be."""
    print(f"inside a node, 0 -> 1:          {_inside(rig)}")
    if rig.nodes == 1:
        return
    across = rig.local_ranks
    alone = measure(rig, [(0, across)])[0]
    print(f"between nodes, 0 -> {across}:         {alone:,.0f} Mbit/s of {rig.rate_mbit}")
    pairs = [(rank, across + rank) for rank in range(rig.local_ranks)]
    together = measure(rig, pairs)
    print(f"all rails of node 0 at once:    {', '.join(f'{rate:,.0f}' for rate in together)} Mbit/s")
    if rig.local_ranks > 1:
        crowd = measure(rig, [(0, across), (1, across)], ports=True)
        print(f"0 and 1 -> {across}, both at once:    {' + '.join(f'{rate:,.0f}' for rate in crowd)} Mbit/s")
        if sum(crowd) > 1.1 * rig.rate_mbit:
            raise RigError(f"a rail received {sum(crowd):,.0f} Mbit/s of {rig.rate_mbit}: receiving is not shaped")
    if not 0.7 * rig.rate_mbit < alone < 1.1 * rig.rate_mbit:
        raise RigError(f"a rail carried {alone:,.0f} Mbit/s instead of {rig.rate_mbit}")


def _inside(rig: Rig) -> str:
    if rig.local_ranks == 1:
        return "one rank per node"
    return f"{measure(rig, [(0, 1)])[0]:,.0f} Mbit/s"


def measure(rig: Rig, pairs: Sequence[tuple[int, int]], *, ports: bool = False) -> list[float]:
    """Mbit/s from the first to the second rank of every pair, all at once (`ports`: pairs share a receiver)."""
    receivers, senders = [], []
    try:
        for index, (_, target) in enumerate(pairs):
            place = (rig.address(target), str(5201 + index * ports))
            receivers.append(_probe(target, "receive", *place))
            assert receivers[-1].stdout is not None
            receivers[-1].stdout.readline()  # it listens now
        for index, (source, target) in enumerate(pairs):
            senders.append(_probe(source, "send", rig.address(target), str(5201 + index * ports), str(_PROBE_S)))
        outputs = [process.communicate(timeout=30 * _PROBE_S)[0] for process in receivers]
    finally:
        for process in (*receivers, *senders):
            process.kill()
            process.wait()
    return [float(text) for text in outputs]


def _probe(rank: int, *words: str) -> subprocess.Popen[str]:
    probe = Path(__file__).with_name("probe.py")
    command: Command = ("ip", "netns", "exec", namespace(rank), sys.executable, str(probe), *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def bench(rig: Rig, words: Sequence[str]) -> int:
    """The exit code of `burst bench WORDS` with every rank in its namespace."""
    programs = {"attention": ("burst_cli", "bench", "attention"), "linear": ("benchmarks.bench_linear",)}
    if not words or words[0] not in programs:
        raise RigError(f"bench: got {' '.join(words) or 'nothing'!r}; expected attention or linear, and its options")
    settings = ("--ranks", str(rig.ranks), "--nodes", str(rig.nodes))
    prefix = f"ip netns exec {namespace('{rank}')}"
    command = (sys.executable, "-m", *programs[words[0]], *words[1:], *settings, "--rank-command", prefix)
    print(f"{rig.nodes} nodes x {rig.local_ranks} ranks, {rig.rate_mbit} Mbit/s per rail", file=sys.stderr)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": NODE_INTERFACE}
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            time.sleep(0.1)  # burst had the signal too, and ends its ranks first


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
