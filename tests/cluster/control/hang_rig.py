"""Runs of the trainer that hang for real, and what their ranks then say: torchrun, gloo, signals, files.

`python hang_rig.py FAULT FIXTURE` records one. Fixtures in tests/cluster/control/hangs/ are such recordings.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from testkit import KIT, ROOT

from cluster.control.hang_blame import RankEvidence
from engine.config.cluster import ClusterConfig
from engine.config.settings import (
    AttentionConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    dump_config,
)
from engine.runs.folder import RunFolder

START_S = 180.0
QUIET_S = 2.0
ANSWER_S = 5.0
MODEL = ModelConfig(
    name="test",
    vocab_size=320,
    hidden_size=32,
    ffn_hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
)


def hang_config(folder: Path, ranks: int) -> RunConfig:
    """A run of endless small steps on `ranks` ranks, on a text of its own."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return RunConfig(
        exp="hang",
        model=MODEL,
        attention=AttentionConfig(preset="burst"),
        loss=LossConfig(chunk_tokens=16),
        optimizer=OptimizerConfig(schedule="constant"),
        train=TrainConfig(seq_len=64, steps=100_000, compute_dtype="float32", peak_flops_per_device=1e12),
        data=DataConfig(format="text", paths=(str(text),), prepared_dir=str(folder / "prepared")),
        cluster=ClusterConfig(backend="gloo", ranks_per_node=ranks, threads_per_rank=1),
    )


@contextlib.contextmanager
def hanging_run(folder: Path, fault: str, ranks: int, module: str = "engine.train") -> Iterator[RunFolder]:
    """A started run with a fault; all of its processes are killed at the end."""
    run = RunFolder(folder / "hang" / "20260101-000000-abcdef")
    run.path.mkdir(parents=True)
    (run.path / "config.yaml").write_text(dump_config(hang_config(folder, ranks)))
    environment = {
        **os.environ,
        "BURST_FAULT": fault,
        "BURST_NODE": "node1",
        "BURST_RANK_LOGS": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT}:{KIT}",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-m", module, str(run.path / "config.yaml")],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder,
        )
    try:
        yield run
    finally:
        for pid in rank_pids(run).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def rank_pids(run: RunFolder) -> dict[int, int]:
    """Process of every rank, by what the ranks say."""
    documents = (read_json(path) for path in run.log_dir("node1").glob("rank*.status.json"))
    return {document["rank"]: document["pid"] for document in documents if document}


def wait_until_quiet(run: RunFolder, ranks: int, first_step: int) -> None:
    """Returns when all ranks are at `first_step` at least (or have not got there) and nothing moves any more."""
    deadline, moved, last = time.monotonic() + START_S, time.monotonic(), ""
    while time.monotonic() < deadline:
        documents = [read_json(path) or {} for path in sorted(run.log_dir("node1").glob("rank*.status.json"))]
        if any(document.get("ended") for document in documents):
            break
        now = json.dumps(
            [[document.get("step"), document.get("phase"), document.get("steps_done")] for document in documents]
        )
        if now != last:
            moved, last = time.monotonic(), now
        reached = [document for document in documents if (document.get("step") or 0) >= first_step]
        if len(documents) == ranks and len(reached) >= 1 and time.monotonic() - moved > QUIET_S:
            return
        time.sleep(0.05)
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in run.log_dir("node1").glob("rank*.log"))
    raise AssertionError(
        f"the run does not hang: {last}\n{logs}\n{(run.path.parents[1] / 'torchrun.log').read_text()[-2000:]}"
    )


def gather_evidence(run: RunFolder, ranks: int) -> list[RankEvidence]:
    """What every rank says when it is asked, as a supervisor asks."""
    folder = run.log_dir("node1")
    (folder / "flight.request").write_text("n1")
    pids = rank_pids(run)
    before = {rank: (folder / f"rank{rank:04d}.stacks").stat().st_size for rank in pids}
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    time.sleep(ANSWER_S)
    return [evidence_of(folder, rank, pids.get(rank), before.get(rank, 0)) for rank in range(ranks)]


def evidence_of(folder: Path, rank: int, pid: int | None, before: int) -> RankEvidence:
    stacks = (folder / f"rank{rank:04d}.stacks").read_bytes()[before:].decode(errors="replace")
    flight = read_json(folder / f"rank{rank:04d}.flight.json")
    return RankEvidence(
        rank,
        "node1",
        process_state(pid),
        read_json(folder / f"rank{rank:04d}.status.json"),
        stacks or None,
        flight if flight and flight.get("nonce") == "n1" else None,
    )


def process_state(pid: int | None) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "gone"
    return text.rpartition(")")[2].split()[0]


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def load_recording(path: Path) -> list[RankEvidence]:
    """The evidence of a recorded hang."""
    return [RankEvidence(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def on_hosts(evidence: list[RankEvidence], hosts: Mapping[int, str]) -> list[RankEvidence]:
    """The same evidence with ranks on other hosts."""
    return [replace(one, host=hosts.get(one.rank, one.host)) for one in evidence]


def record(fault: str, target: Path, ranks: int, module: str, folder: Path) -> None:
    step = int(fault.split(";")[2]) if ";" in fault else 1
    with hanging_run(folder, fault, ranks, module) as run:
        wait_until_quiet(run, ranks, step)
        found = gather_evidence(run, ranks)
    text = json.dumps([shortened(asdict(one)) for one in found], indent=1)
    text = re.sub(r"/[^\"\s]*/(site-packages|lib/python3\.\d+)/", r"/usr/\1/", text.replace(str(ROOT), "/burst"))
    target.write_text(text + "\n", encoding="utf-8")


def shortened(evidence: dict[str, Any]) -> dict[str, Any]:
    """The evidence without collectives of long ago."""
    if evidence["flight"]:
        evidence["flight"]["entries"] = evidence["flight"]["entries"][-6:]
    return evidence


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        record(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(temporary))
