"""What each check means, in a sentence or two, for `burst check-nodes --explain`; also the list of all checks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from engine.errors import ConfigError

EXPLANATIONS: Mapping[str, str] = {
    "ssh.reach": "The node could be reached over SSH and showed the host key that is known; if not, which step failed.",
    "ssh.probe": "The node's answer came whole. If not, every check that rests on a missing part is UNKNOWN.",
    "ssh.clock": "The node's clock against the median of all nodes (of fewer than three: against this machine): logs "
    "of several nodes can only be compared with equal clocks.",
    "gpu.nvidia_smi": "nvidia-smi answers, whole and in time. A driver that hangs here hangs in training, too.",
    "gpu.lost": "Every GPU can be reached by the driver. One that fell off the bus needs a reboot, if that helps.",
    "gpu.count": "nvidia-smi, the PCI bus and the configuration (else the other nodes) agree on the number of GPUs.",
    "gpu.model": "All GPUs are of one model, the expected one. Mixed ones run at the speed of the slowest.",
    "gpu.driver": "The driver has the expected version, else that of most nodes. NCCL between different ones may fail.",
    "gpu.xid": "Errors (Xid) that the kernel logged for a GPU since boot: some need a reset, some a reboot.",
    "gpu.sxid": "Errors (SXid) of NVSwitches since boot; a fatal one stops all traffic between GPUs of the node.",
    "gpu.recovery": "The driver asks for no reset, drain or reboot of a GPU.",
    "gpu.ecc_mode": "Memory errors are corrected and counted (ECC is on), and no change of that waits for a reboot.",
    "gpu.ecc": "No uncorrectable memory error since the driver loaded; after one, results cannot be trusted.",
    "gpu.sram": "Uncorrectable errors of caches over the life of the board; past the threshold it must be replaced.",
    "gpu.row_remap": "Repairs of bad memory rows: one that waits needs a reset, one that failed a new board.",
    "gpu.pcie": "All PCIe lanes are up, and at full clocks the full generation. Fewer lanes slow copies to the host.",
    "gpu.nvlink": "Every NVLink is up, as many per GPU as on the others, at the same speed.",
    "gpu.p2p": "Every GPU reaches every other over NVLink, without going through the host.",
    "gpu.fabric_manager": "The daemon that sets up NVSwitches runs, in the driver's version; without it CUDA fails.",
    "gpu.throttle": "Nothing holds the clocks down: heat, power brake or the power supply.",
    "gpu.power_limit": "Nobody lowered the power limit, and all GPUs have the same.",
    "gpu.clocks": "Nobody locked the clocks below the default, and all GPUs can reach the same.",
    "gpu.mig": "No GPU is cut into instances (MIG): a rank takes a whole GPU.",
    "gpu.busy": "Nobody else uses a GPU, seen twice; who does, and since when.",
    "gpu.cuda_smoke": "A matrix product on every GPU inside the run image; only with --cuda-smoke.",
    "ib.count": "As many InfiniBand or RoCE ports as configured, else as on most nodes; each with a driver.",
    "ib.state": "Every port for training is up: ACTIVE and LinkUp. One good port says nothing about the others.",
    "ib.rate": "Every port that is up runs at the configured rate, else at that of the others.",
    "ib.link_layer": "The ports for training speak the same on all nodes, InfiniBand or Ethernet.",
    "ib.mtu": "The interfaces of the ports have one MTU, which does not cut the packets of RoCE.",
    "ib.pcie": "Every adapter has all its PCIe lanes, and PCIe is as fast as its port.",
    "ib.gid": "Every RoCE port has a GID of RoCE v2 over IPv4, at one index on all ports.",
    "ib.counters": "Errors that are being counted now, over two looks; what a counter stands at may be years old.",
    "ib.flaps": "What the kernel logged of links that go up and down.",
    "ib.health": "What the kernel logged of adapters: failing firmware, PCIe links that are too slow.",
    "ib.gpudirect": "Adapters may reach GPU memory (nvidia_peermem or DMA-BUF); else traffic goes through the host.",
    "net.interface": "There is one interface that other nodes can reach: up, with IPv4, not of containers.",
    "net.subnet": "The interfaces that nodes talk over lie in one subnet, and no two nodes have one address.",
    "net.mtu": "These interfaces have one MTU; different ones lose large packets without a word.",
    "net.pairs": "Every node can open a TCP connection to every other, in both directions.",
    "host.disk": "Free space on the root file system and for temporary files.",
    "host.inodes": "Free inodes: without them no file can be made, whatever space there is.",
    "host.shm": "Free space in /dev/shm, through which ranks of a node talk.",
    "host.memory": "The same main memory on all nodes, within 3%: a module may have failed.",
    "host.memory_free": "How much main memory is free: what else sits there.",
    "host.memlock": "How much memory a session may lock; RDMA needs all of it.",
    "host.nofile": "How many files a session may open.",
    "host.runs": "Processes of earlier runs of ours that are still there.",
    "host.python": "Python on the node is new enough for ranks; where they run in containers, for their supervisor.",
    "host.torch": "PyTorch is installed in the same version everywhere, where ranks run without a container.",
    "host.nccl": "NCCL has the same version everywhere; different ones do not talk to each other.",
    "host.nccl_conf": "NCCL settings that lie around on the node: /etc/nccl.conf, ~/.nccl.conf, the session.",
    "host.docker": "The container engine answers and is new enough.",
    "host.docker_disk": "The engine's folder can hold the image twice: it is packed and unpacked there.",
    "host.docker_gpu": "Containers can be given GPUs: the NVIDIA runtime or CDI is set up.",
    "host.image": "The image of the configuration is there, and the same one on all nodes.",
    "host.shared": "The shared folder is one and the same: what one node writes, all others read.",
}


def explain(word: str) -> dict[str, str]:
    """What a check (`gpu.ecc`) or each check of a group (`gpu`) means. Raises ConfigError for other words."""
    found = {name: text for name, text in EXPLANATIONS.items() if name == word or name.startswith(f"{word}.")}
    if not found:
        raise ConfigError(unknown_check("--explain", word))
    return found


def unknown_check(option: str, word: str) -> str:
    """What is wrong with `word`, which names neither a group nor a check."""
    near = difflib.get_close_matches(word, EXPLANATIONS, n=1, cutoff=0.75)
    groups = ", ".join(dict.fromkeys(name.partition(".")[0] for name in EXPLANATIONS))
    hint = f"did you mean {near[0]}?" if near else "`burst check-nodes --explain gpu` lists the checks of a group"
    return f"{option} {word!r}: expected a group ({groups}) or a check of one, such as gpu.busy; {hint}"
