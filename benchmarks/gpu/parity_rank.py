"""One rank of the comparison of presets, `python -m benchmarks.gpu.parity_rank FOLDER`; rank 0 writes the rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.gpu.parity import REFERENCE_FILE, ROWS_FILE, compare, read_case, train
from engine.config.errors import ConfigError
from engine.distributed.mesh import read_placement
from engine.training.rank.process import leave

TIMEOUT = timedelta(seconds=40)  # of one collective: a rank that waits longer waits for a dead one


def main(argv: Sequence[str]) -> int:
    """All presets of the case in turn."""
    (folder,) = map(Path, argv)
    case, placement = read_case(folder), read_placement()
    torch.set_num_threads(1)
    if case.device == "cuda":
        torch.cuda.set_device(0)
    store = FileStore(str(folder / "store"), placement.world_size)
    dist.init_process_group("gloo", store=store, rank=placement.rank, world_size=placement.world_size, timeout=TIMEOUT)
    alone = {dtype: dict(np.load(folder / REFERENCE_FILE.format(dtype))) for dtype in case.dtypes}
    for preset in case.presets:
        for dtype in case.dtypes:
            try:
                found = train(case, preset, dtype, placement.world_size)
                row = compare(case, preset, dtype, found, alone[dtype])
            except ConfigError as error:  # the same on every rank: what these ranks cannot run
                row = {
                    "label": f"{preset} on {case.ranks} ranks",
                    "preset": preset,
                    "ranks": case.ranks,
                    "dtype": dtype,
                }
                row |= {"status": "not available", "error": "; ".join(error.problems)}
            if placement.rank == 0:
                with (folder / ROWS_FILE).open("a", encoding="utf-8") as rows:
                    rows.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
