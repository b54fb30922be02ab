"""How much host memory a rank's activations may take: its share of the node's, less what its optimizer needs there.

The plan decides before anything is booked whether that is enough (`burst plan`, and every launch); the limit holds
where the plan was wrong or passed over: then the run ends as out of memory with a sentence that says what to change,
and before the system kills whatever process it likes. Pinned memory cannot be swapped out.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config.settings import MemoryConfig
from engine.planning.memory.capacity import host_memory
from engine.planning.memory.cost import state_bytes


def activation_limit(memory: MemoryConfig, device: torch.device, local_ranks: int, parameters: int) -> int | None:
    """Bytes of host memory for the activations of one of `local_ranks` ranks; None: no limit.

    memory.host_bytes counts for all ranks of a node and for all that lies there. Without it a GPU's rank may use its
    share of what this machine has; a rank on a CPU has no limit: its host memory is its device's, which is planned as
    one.
    """
    on_gpu = device.type == "cuda"
    node_bytes = memory.host_bytes
    if node_bytes is None and on_gpu:
        node_bytes, _ = host_memory(Path("/proc"), Path("/sys/fs/cgroup"))
    if node_bytes is None:
        return None
    taken = state_bytes(memory, parameters) if on_gpu and memory.optimizer_store == "host" else 0
    return max(0, node_bytes // local_ranks - taken)
