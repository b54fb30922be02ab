"""Fake GPUs of a testbed node: a `nvidia-smi` that answers, with the PCI tree, kernel log and processes that fit to it.

Nodes differ in serial numbers and UUIDs, and in nothing else. GPU k and the network adapter of its rail sit below one
PCI switch, see `gpu_pci_path` and `adapter_pci_path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster.testbed.hardware.files import FakeFile
from cluster.testbed.hardware.gpus_smi import PROCESS_NAME, FakeAdapter, FakeGpu, GpuModel, smi_script
from engine.errors import ConfigError

GPU_FAULTS: Mapping[str, str] = {
    "gpu_lost": "GPU N: Xid 79 in the kernel log, and every nvidia-smi ends with an error",
    "gpu_absent": "GPU N: on PCI, not listed by nvidia-smi",
    "ecc": "GPU N: two uncorrectable errors since the driver loaded",
    "remap_pending": "GPU N: a row remapping that waits for a reset",
    "xid": "CODE or CODE:N: that Xid in the kernel log, of GPU 0 or N",
    "sxid": "a fatal error of the first NVSwitch in the kernel log",
    "driver": "VERSION: another driver",
    "busy": "GPU N: in use by a process of root",
    "ghost": "GPU N: memory in use without a process",
    "throttle": "GPU N: slowed down by the hardware because of heat",
    "pcie_width": "GPU N: 8 lanes instead of 16",
    "nvlink_down": "GPU N: NVLink 5 inactive",
    "no_fabric_manager": "NVSwitches without the daemon that sets them up",
    "smi_hangs": "a nvidia-smi that never ends",
    "smi_truncated": "a nvidia-smi that breaks off",
    "smi_missing": "no nvidia-smi",
}
_ADAPTER_FILE = re.compile(r"root/sys/devices/(pci[^/]+(?:/[0-9a-f:.]+)+)/infiniband/([^/]+)/fw_ver")
_NODE_FAULTS = {"sxid", "no_fabric_manager", "smi_hangs", "smi_truncated", "smi_missing"}
BUSY_PID = 424242
_FABRIC_MANAGER_PID = 4711
_SWITCH_CLASS, _GPU_CLASS = "0x068000", "0x030200"


@dataclass(frozen=True)
class _Board:
    """Where things sit: PCI buses of GPUs, root complexes (one switch each) with the GPUs below them, NVSwitches."""

    model: GpuModel
    buses: tuple[str, ...]
    roots: tuple[str, ...]
    adapter_buses: tuple[str, ...]  # one per root complex
    nvswitches: int

    def root(self, index: int) -> int:
        return index * len(self.roots) // len(self.buses)


_H100 = GpuModel(
    name="NVIDIA H100 80GB HBM3",
    architecture="Hopper",
    driver="550.127.05",
    cuda="12.4",
    vbios="96.00.99.00.01",
    memory_mib=81559,
    power_w=700,
    sm_mhz=1980,
    memory_mhz=2619,
    pcie_generation=5,
    nvlinks=18,
    nvlink_gbps="26.562",
    pci_device="0x2330",
    switch_device="0x22a3",
)
_H200 = replace(
    _H100,
    name="NVIDIA H200",
    driver="570.86.15",
    cuda="12.8",
    vbios="96.00.BC.00.01",
    memory_mib=143771,
    memory_mhz=3201,
)
_H200 = replace(_H200, pci_device="0x2335")
_A100 = GpuModel(
    name="NVIDIA A100-SXM4-80GB",
    architecture="Ampere",
    driver="525.105.17",
    cuda="12.0",
    vbios="92.00.45.00.03",
    memory_mib=81920,
    power_w=400,
    sm_mhz=1410,
    memory_mhz=1593,
    pcie_generation=4,
    nvlinks=12,
    nvlink_gbps="25",
    pci_device="0x20b2",
    switch_device="0x1af1",
)
_HGX = _Board(
    _H100,
    ("1b", "43", "52", "61", "9d", "c3", "d1", "df"),
    ("15", "3d", "4c", "5b", "97", "bd", "cb", "d9"),
    ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc"),
    4,
)
BOARDS: Mapping[str, _Board] = {
    "h100x8": _HGX,
    "h200x8": replace(_HGX, model=_H200),
    "a100x8": _Board(
        _A100,
        ("07", "0f", "47", "4e", "87", "90", "b7", "bd"),
        ("00", "40", "80", "b0"),
        ("0c", "4b", "84", "ba"),
        6,
    ),
}


def gpu_files(
    profile: str, node: str, faults: tuple[str, ...] = (), *, adapters: tuple[FakeAdapter, ...] | None = None
) -> dict[str, FakeFile]:
    """The files of the GPUs of `node`, by path; none for profile `none`. Raises ConfigError for a fault it cannot have.

    `adapters`: those that `topo -m` shows, see `fake_adapters`; by default one per PCI switch, mlx5_0 and so on.
    """
    if profile == "none":
        if faults:
            raise ConfigError(
                f"{node} has no GPUs, so {faults[0]} cannot happen to it; choose one of {', '.join(BOARDS)}"
            )
        return {}
    board = BOARDS.get(profile)
    if board is None:
        raise ConfigError(f"no hardware profile {profile!r}; there are {', '.join(BOARDS)} and none")
    plan = _Faults(board, faults)
    gpus = tuple(
        plan.damage(FakeGpu.make(board.model, node, k, _address(bus), _switch(board, k)[1]))
        for k, bus in enumerate(board.buses)
    )
    if adapters is None:
        adapters = _usual_adapters(board)
    return {
        "bin/nvidia-smi": FakeFile(_script(gpus, adapters, plan), 0o755),
        **dict(_gpu_tree(profile, board, gpus)),
        **dict(_switch_tree(board)),
        **_processes(gpus, plan),
        "root/var/log/kernel-gpus.log": FakeFile(_kernel_log(plan)),
        "root/proc/driver/nvidia/version": FakeFile(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {plan.driver}  Release Build\n"
        ),
    }


def gpu_pci_path(profile: str, index: int) -> tuple[str, ...]:
    """PCI addresses from the root port to GPU `index`, the GPU last."""
    board = BOARDS[profile]
    port = index - next(k for k in range(len(board.buses)) if board.root(k) == board.root(index))
    return (*_switch(board, index), f"0000:{_bus(board, index, 2)}:{port:02x}.0", _address(board.buses[index]))


def adapter_pci_path(profile: str, index: int) -> tuple[str, ...]:
    """PCI addresses from the root port to the network adapter that shares a switch with GPU `index`."""
    board = BOARDS[profile]
    bus = board.adapter_buses[board.root(index)]
    return (*_switch(board, index), f"0000:{_bus(board, index, 2)}:08.0", _address(bus))


def pci_folder(path: tuple[str, ...]) -> str:
    """The folder of a PCI device below /sys/devices: `pci0000:15/0000:15:01.0/.../0000:1b:00.0`."""
    return "/".join((f"pci{path[0][:7]}", *path))


def fake_adapters(files: Mapping[str, FakeFile]) -> tuple[FakeAdapter, ...]:
    """The adapters among the fake files of a node, in the order of their numbers."""
    found = []
    for path in files:
        match = _ADAPTER_FILE.fullmatch(path)
        if match is None:
            continue
        folder, name = match.groups()
        steps = folder.split("/")
        numa = files.get(f"root/sys/devices/{folder}/numa_node", FakeFile("0")).text.strip()
        found.append(FakeAdapter(name, steps[2] if len(steps) > 3 else steps[-1], int(numa)))
    return tuple(
        sorted(found, key=lambda one: [int(part) if part.isdigit() else 99 for part in one.name.split("_")[1:]])
    )


def is_gpu_fault(fault: str) -> bool:
    """Whether `fault` (`ecc:2`) is of a kind that GPUs can have."""
    return fault.partition(":")[0] in GPU_FAULTS


class _Faults:
    """The faults of one node, checked, and what they change."""

    def __init__(self, board: _Board, faults: Iterable[str]) -> None:
        self._board = board
        self._values: dict[str, str] = {}
        for fault in faults:
            name, _, value = fault.partition(":")
            self._check(fault, name, value)
            self._values[name] = value

    def _check(self, fault: str, name: str, value: str) -> None:
        if name not in GPU_FAULTS:
            raise ConfigError(f"no fault {fault!r} of a GPU; there are {', '.join(GPU_FAULTS)}")
        number = value.rpartition(":")[2]
        gpus = len(self._board.buses)
        if name in _NODE_FAULTS:
            right = not value
        elif name == "driver":
            right = bool(value) and value.replace(".", "").isdigit()
        elif name == "xid":
            right = all(part.isdigit() for part in value.split(":")) and (":" not in value or int(number) < gpus)
        else:
            right = value.isdigit() and int(value) < gpus
        if not right:
            raise ConfigError(f"{fault!r} makes no sense ({gpus} GPUs). {name}: {GPU_FAULTS[name]}")

    def has(self, name: str) -> bool:
        return name in self._values

    def index(self, name: str) -> int | None:
        """The GPU that the fault is about."""
        value = self._values.get(name)
        return None if value is None else int(value.rpartition(":")[2])

    @property
    def driver(self) -> str:
        return self._values.get("driver", self._board.model.driver)

    def damage(self, gpu: FakeGpu) -> FakeGpu:
        """`gpu` with the faults that concern it."""
        changes: dict[str, object] = {"driver": self.driver}
        if gpu.index == self.index("ecc"):
            changes["uncorrectable"] = 2
        if gpu.index == self.index("remap_pending"):
            changes["remap_pending"] = True
        if gpu.index == self.index("busy"):
            changes |= {"used_mib": 71680, "pid": BUSY_PID}
        if gpu.index == self.index("ghost"):
            changes["used_mib"] = 20480
        if gpu.index == self.index("throttle"):
            changes["throttled"] = ("hw_slowdown", "hw_thermal_slowdown")
        if gpu.index == self.index("pcie_width"):
            changes["width"] = 8
        if gpu.index == self.index("nvlink_down"):
            changes["inactive_link"] = 5
        return replace(gpu, **changes)  # type: ignore[arg-type]

    def kernel_lines(self) -> Iterable[str]:
        """What the drivers said, without times."""
        address = [_address(bus)[:-2] for bus in self._board.buses]
        lost, xid = self.index("gpu_lost"), self._values.get("xid")
        if lost is not None:
            yield f"NVRM: Xid (PCI:{address[lost]}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
            yield f"NVRM: GPU {address[lost]}.0: GPU has fallen off the bus."
        if xid is not None:
            code, _, index = xid.partition(":")
            yield f"NVRM: Xid (PCI:{address[int(index or 0)]}): {code}, pid=2503421, name=python3, Ch 00000008"
        if self.has("sxid"):
            yield f"nvidia-nvswitch0: SXid (PCI:{_switch_address(0)}): 20034, Fatal, Link 30 LTSSM Fault Up"


def _script(gpus: tuple[FakeGpu, ...], adapters: tuple[FakeAdapter, ...], plan: _Faults) -> str:
    if plan.has("smi_missing"):
        # A real tool further down in PATH must not answer for the fake one.
        return "#!/bin/sh\necho 'nvidia-smi: not found' >&2\nexit 127\n"
    lost, absent = plan.index("gpu_lost"), plan.index("gpu_absent")
    listed = (gpu for gpu in gpus if gpu.index != absent)
    return smi_script(
        tuple(replace(gpu, index=number) for number, gpu in enumerate(listed)),
        adapters=adapters,
        lost=None if lost is None else gpus[lost].address,
        hangs=plan.has("smi_hangs"),
        truncated=plan.has("smi_truncated"),
    )


def _usual_adapters(board: _Board) -> tuple[FakeAdapter, ...]:
    first = [next(k for k in range(len(board.buses)) if board.root(k) == root) for root in range(len(board.roots))]
    return tuple(FakeAdapter(f"mlx5_{root}", _switch(board, k)[1], k // 4) for root, k in enumerate(first))


def _address(bus: str) -> str:
    return f"0000:{bus}:00.0"


def _switch_address(number: int) -> str:
    return f"0000:{0xF9 + number:02x}:00.0"


def _bus(board: _Board, index: int, offset: int) -> str:
    return f"{int(board.roots[board.root(index)], 16) + offset:02x}"


def _switch(board: _Board, index: int) -> tuple[str, str]:
    return f"0000:{_bus(board, index, 0)}:01.0", f"0000:{_bus(board, index, 1)}:00.0"


def _device(folder: str, values: Mapping[str, str]) -> Iterable[tuple[str, FakeFile]]:
    address = folder.rpartition("/")[2]
    yield f"root/sys/bus/pci/devices/{address}", FakeFile(link_to=f"../../../devices/{folder}")
    for name, value in values.items():
        yield f"root/sys/devices/{folder}/{name}", FakeFile(f"{value}\n")


def _gpu_tree(profile: str, board: _Board, gpus: tuple[FakeGpu, ...]) -> Iterable[tuple[str, FakeFile]]:
    speed = {4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}[board.model.pcie_generation]
    for gpu in gpus:
        yield from _device(
            pci_folder(gpu_pci_path(profile, gpu.index)),
            {
                "vendor": "0x10de",
                "device": board.model.pci_device,
                "class": _GPU_CLASS,
                "numa_node": str(gpu.numa_node),
                "current_link_width": str(gpu.width),
                "max_link_width": "16",
                "current_link_speed": speed,
                "max_link_speed": speed,
            },
        )


def _switch_tree(board: _Board) -> Iterable[tuple[str, FakeFile]]:
    for number in range(board.nvswitches):
        folder = pci_folder(("0000:f8:01.0", _switch_address(number)))
        values = {"vendor": "0x10de", "device": board.model.switch_device, "class": _SWITCH_CLASS, "numa_node": "0"}
        yield from _device(folder, {**values, "current_link_width": "2", "max_link_width": "2"})


def _processes(gpus: tuple[FakeGpu, ...], plan: _Faults) -> dict[str, FakeFile]:
    # Ten days of uptime; the fields between name and start do not matter. A start at 86400 s: nine days of age.
    stat = "S 1 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 8640000 0 0"
    found = {gpu.pid: PROCESS_NAME for gpu in gpus if gpu.pid is not None} | {1: "systemd"}
    if not plan.has("no_fabric_manager"):
        found[_FABRIC_MANAGER_PID] = "nv-fabricmanage"
    files = {"root/proc/uptime": FakeFile("864000.00 1728000.00\n")}
    for pid, name in found.items():
        files[f"root/proc/{pid}/comm"] = FakeFile(f"{name}\n")
        files[f"root/proc/{pid}/stat"] = FakeFile(f"{pid} ({name}) {stat}\n")
    return files


def _kernel_log(plan: _Faults) -> str:
    lines = ["Linux version 5.15.0-126-generic", "pci 0000:00:00.0: [8086:09a2] type 00 class 0x088000"]
    lines.append(f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {plan.driver}  Release Build")
    lines += plan.kernel_lines()
    return "".join(f"[{12 * number:5d}.000000] {line}\n" for number, line in enumerate(lines))
