"""`burst image push` to a testbed with shaped links, beside `docker save | ssh NODE docker load` node by node.

Real sshd and Docker engines in network namespaces; every link, that of this machine included, carries --rate each way.
All engines keep their images in memory: on one disk for all nodes the disk would be measured. Images are removed before
every turn; times are of whole processes, the export from the engine of this machine included.

    python -m benchmarks.bench_image --output benchmarks/results/image_HARDWARE_YYYYMM.json      (root, Linux)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from testkit.image_rig import LauncherEngine, launcher_engine, noise, saved_image, tar_of  # noqa: E402

from benchmarks.arguments import at_least_1  # noqa: E402
from cluster.testbed.build import up  # noqa: E402
from cluster.testbed.spec import TestbedSpec, parse_rate  # noqa: E402
from cluster.testbed.teardown import tear_down  # noqa: E402
from cluster.testbed.testbed import Testbed  # noqa: E402

NAME = "benchimage"
IMAGE = "bench/app:1"
LAYERS = 6
MIB = 1 << 20


def prose(size: int, seed: int) -> bytes:
    """Text that packs to roughly a quarter."""
    rng = random.Random(seed)
    words = [rng.randbytes(4).hex().encode() for _ in range(4096)]
    text = b" ".join(rng.choices(words, k=1 << 16)) + b"\n"
    return (text * (size // len(text) + 1))[:size]


@dataclass(frozen=True)
class Turn:
    """One run. received_bytes: on the wire to all nodes; None where nobody counts."""

    what: str
    elapsed_s: float
    ok: bool
    received_bytes: int | None = None


class Rig:
    """A testbed, an engine for this machine, and a configuration that names both."""

    def __init__(self, testbed: Testbed, engine: LauncherEngine, folder: Path) -> None:
        self.testbed, self.engine = testbed, engine
        self._environment = {
            **os.environ,
            "DOCKER_HOST": engine.host,
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def build(self, layer_mib: int, last_seed: int = 0) -> int:
        """Bytes of the new image: half of its layers do not pack, half pack to about a quarter."""
        seeds = [*range(1, LAYERS), -last_seed]
        layers = [
            tar_of({f"layer{k}": (noise if k % 2 else prose)(layer_mib * MIB, seed)}) for k, seed in enumerate(seeds)
        ]
        self.engine("load", "--quiet", stdin=saved_image(*layers, name=IMAGE)[0])
        return int(self.engine("image", "inspect", "--format", "{{.Size}}", IMAGE))

    def push(self, what: str) -> Turn:
        """`burst image push`, as a process of its own."""
        command = [sys.executable, "-m", "burst_cli", "image", "push", f"cluster={NAME}", "--image", IMAGE, "--json"]
        begin = time.monotonic()
        done = subprocess.run(command, env=self._environment, cwd=ROOT, capture_output=True)
        elapsed = time.monotonic() - begin
        document: Mapping[str, Any] = json.loads(done.stdout or "{}")
        if done.returncode:
            sys.stderr.write(done.stderr.decode())
        return Turn(what, elapsed, done.returncode == 0, document.get("received_bytes"))

    def one_by_one(self) -> Turn:
        """What people do by hand."""
        begin = time.monotonic()
        codes = []
        for node in self.testbed.node_names:
            ssh = f"ssh -F {self.testbed.ssh_config} {node} docker load"
            command = ["bash", "-o", "pipefail", "-c", f"docker save {IMAGE} | {ssh}"]
            codes.append(subprocess.run(command, env=self._environment, capture_output=True).returncode)
        return Turn("docker save | ssh docker load, one node after the other", time.monotonic() - begin, not any(codes))

    def clean(self) -> None:
        """No image anywhere but in this machine's engine."""
        for node in self.testbed.nodes:
            environment = {**os.environ, "DOCKER_HOST": f"unix://{node.docker_socket}"}
            subprocess.run(["docker", "image", "prune", "-af"], env=environment, check=True, capture_output=True)


def measure(rig: Rig, layer_mib: int, repeats: int) -> tuple[int, list[Turn]]:
    """The size of the image, and all turns."""
    turns: list[Turn] = []
    size = rig.build(layer_mib)
    for _ in range(repeats):
        rig.clean()
        turns.append(show(rig.push("push, chain")))
        turns.append(show(rig.push("push again")))
    rig.build(layer_mib, last_seed=1)
    turns.append(show(rig.push("push after one layer changed")))
    for _ in range(repeats):
        rig.clean()
        turns.append(show(rig.one_by_one()))
    return size, turns


def show(turn: Turn) -> Turn:
    """The same, printed."""
    received = "" if turn.received_bytes is None else f"  {turn.received_bytes / 1e6:8.1f} MB received by all nodes"
    print(f"{turn.elapsed_s:7.2f} s  {'ok' if turn.ok else 'FAILED'}  {turn.what}{received}", flush=True)
    return turn


def verdicts(size: int, rate_bytes: float, turns: Sequence[Turn]) -> dict[str, Any]:
    """The figures that were aimed at, from the worst push and the best hand-made turn."""

    def times(what: str) -> list[float]:
        return [turn.elapsed_s for turn in turns if turn.what.startswith(what)]

    pushed = max(turn.received_bytes or 0 for turn in turns)
    again = [turn for turn in turns if turn.what == "push again"]
    return {
        "push_s": max(times("push, chain")),
        "allowed_s": 1.4 * size / rate_bytes + 10,
        "one_by_one_over_push": min(times("docker save")) / max(times("push, chain")),
        "push_again_s": max(turn.elapsed_s for turn in again),
        "push_again_share_of_bytes": max(turn.received_bytes or 0 for turn in again) / max(1, pushed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=at_least_1, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--layer-mib", type=at_least_1, default=55, help=f"of each of {LAYERS} layers")
    parser.add_argument("--repeats", type=at_least_1, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rate = parse_rate(arguments.rate)
    with tempfile.TemporaryDirectory(prefix="bench-image-", dir="/dev/shm") as temporary:
        folder = Path(temporary)
        config_file = folder / "config" / "burst" / "conf" / "cluster" / f"{NAME}.yaml"
        spec = TestbedSpec(NAME, arguments.nodes, rate_bits_per_s=rate, docker=True, docker_in_memory=True)
        try:
            testbed = up(spec, config_file)
            with launcher_engine() as engine:
                version = engine("version", "--format", "{{.Server.Version}}")
                size, turns = measure(Rig(testbed, engine, folder), arguments.layer_mib, arguments.repeats)
        finally:
            tear_down(NAME, config_file)
    result = {
        "command": " ".join(["python", "-m", "benchmarks.bench_image", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "docker": version,
        "nodes": arguments.nodes,
        "rate": arguments.rate,
        "image_bytes": size,
        "turns": [asdict(turn) for turn in turns],
        "verdicts": verdicts(size, rate / 8, turns),
    }
    print(json.dumps(result["verdicts"], indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
