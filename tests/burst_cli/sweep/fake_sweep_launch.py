"""A stand-in for `python -m burst_cli` as a sweep calls it: `launch OVERRIDES --run-path RUN` and `resume RUN`.

Each cell takes FAKE_CELL_S seconds, and with FAKE_TOGETHER waits until so many run. A cell whose overrides hold
`mode=WORD` fails, runs out of memory, is refused. Every start leaves a line in FAKE_LEDGER for tests to count.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from testkit.waiting import wait_for

from engine.runs.folder import FINAL_STATES, RunFolder, create_run

STEPS = 4


def main() -> int:
    verb, *words = sys.argv[1:]
    path = Path(words[0] if verb == "resume" else words[words.index("--run-path") + 1])
    mode = next((word.partition("=")[2] for word in words if word.startswith("mode=")), "ok")
    assert os.getsid(0) == os.getpid()  # else a Ctrl-C of the terminal came to it and to the sweep, which passes it on
    note(" ".join(["start", path.name, verb, *(word for word in words if word != str(path))]))
    if mode == "refused":
        print("error: the nodes are on strike")
        return 1
    run = RunFolder(path) if verb == "resume" else create_run(path, {"config.yaml": "", "mode": mode}, world_size=1)
    mode = (path / "mode").read_text()
    # An exception: a handler that wrote run.json itself could wait for the lock that its own process holds.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return work(run, mode)
    except KeyboardInterrupt:
        return stop(run)


def work(run: RunFolder, mode: str) -> int:
    run.transition("starting")
    run.transition("running")
    if together := int(os.environ.get("FAKE_TOGETHER", "0")):
        note(f"runs {run.run_id}")
        wait_for(lambda: Path(os.environ["FAKE_LEDGER"]).read_text().count("runs ") >= together, f"{together} cells")
    for step in range(1, STEPS + 1):
        time.sleep(float(os.environ.get("FAKE_CELL_S", "0.1")) / STEPS)
        run.append_metrics({"step": step, "loss": 1.0 / step, "tokens_per_s": 10.0})
    if mode in ("failed", "oom"):
        run.transition(mode, failure={"message": f"it {mode}"})
        return 1
    run.write_summary({"tokens_per_s_per_device": 10.0, "steps": STEPS})
    run.transition("completed")
    return 0


def stop(run: RunFolder) -> int:
    if run.read_state()["state"] not in FINAL_STATES:
        run.transition("cancelled")
    return 130


def note(line: str) -> None:
    with Path(os.environ["FAKE_LEDGER"]).open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
