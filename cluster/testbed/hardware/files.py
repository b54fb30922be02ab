"""The files that tools and the probe read on a machine with GPUs and InfiniBand: /sys, /proc, kernel logs, nvidia-smi.

BURST_PROBE_ROOT goes before /sys, /proc, /etc and /dev in all that a probe reads.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.testbed.hardware.faults import Hardware, build_hardware
from cluster.testbed.hardware.profiles import NO_HARDWARE, Adapter
from engine.config.errors import ConfigError

if TYPE_CHECKING:
    import jinja2

_FABRIC_MANAGER_PID = 4711
_FIRST_NVSWITCH_BUS = 0xF9
_THROTTLE_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "display_clocks_setting",
)
_COUNTERS = (
    "counters/excessive_buffer_overrun_errors",
    "counters/link_error_recovery",
    "counters/local_link_integrity_errors",
    "counters/port_rcv_errors",
    "counters/port_rcv_remote_physical_errors",
    "counters/port_xmit_discards",
    "counters/symbol_error",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
)


@dataclass(frozen=True)
class FakeFile:
    """A file with `text`, or a symbolic link to `link_to` (then text and mode mean nothing)."""

    text: str = ""
    mode: int = 0o644
    link_to: str | None = None

    def write(self, path: Path) -> None:
        """Lay it there, with the folders above."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.link_to is not None:
            path.symlink_to(self.link_to)
        else:
            path.write_text(self.text, encoding="utf-8")
            path.chmod(self.mode)


def hardware_files(profile: str, node: str, number: int, faults: Iterable[str] = ()) -> dict[str, FakeFile]:
    """Every file of `node`, the testbed's `number`-th from 1, by its path below `root/` or `bin/`; see FAULTS.

    Raises ConfigError that names what is unknown: the profile or a fault.
    """
    faults = tuple(faults)
    if profile == NO_HARDWARE:
        if faults:
            raise ConfigError(
                f"hardware {faults[0]}: the testbed has no fake hardware; build one with --hardware h100x8"
            )
        return {}
    hardware = build_hardware(profile, node, number, faults)
    adapters = [adapter for adapter in hardware.adapters if adapter.is_there]
    texts = {**_node_texts(hardware), "var/log/kernel-fabric.log": "".join(f"{one}\n" for one in _fabric_log(adapters))}
    links: dict[str, str] = {}
    for path, values in _devices(hardware):
        folder = pci_folder(path)
        links[f"sys/bus/pci/devices/{path[-1]}"] = folder
        texts |= {f"{folder}/{name}": f"{value}\n" for name, value in values.items()}
    for adapter in adapters:
        _add_adapter(adapter, number, texts, links)
    return {
        "bin/nvidia-smi": FakeFile(_nvidia_smi(hardware), 0o755),
        "bin/dcgmi": FakeFile(_dcgmi(hardware), 0o755),
        **{f"root/{path}": FakeFile(text) for path, text in texts.items()},
        **{f"root/{path}": FakeFile(link_to=_relative(target, path)) for path, target in links.items()},
    }


def pci_folder(path: tuple[str, ...]) -> str:
    """The folder of a PCI device: `sys/devices/pci0000:15/0000:15:01.0/.../0000:1b:00.0`."""
    return "/".join((f"sys/devices/pci{path[0][:7]}", *path))


def _relative(target: str, path: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(path))


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # not where tests run with nothing but the engine's packages

    # Plain text: what is filled in are names and numbers of ours, and checked words.
    environment = jinja2.Environment(
        autoescape=False, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(Path(__file__).with_name("nvidia-smi.sh.j2").read_text(encoding="utf-8"))


def _nvidia_smi(hardware: Hardware) -> str:
    return _template().render(
        model=hardware.model,
        driver=hardware.driver,
        gpus=[gpu for gpu in hardware.gpus if gpu.is_listed],
        lost=next((gpu for gpu in hardware.gpus if gpu.is_lost), None),
        flags=hardware.flags,
        throttle_reasons=_THROTTLE_REASONS,
    )


def _dcgmi(hardware: Hardware) -> str:
    """Stands in for dcgmi: its health monitor and its diagnostic of level 1, in the form of DCGM 4."""
    if "no_dcgm" in hardware.flags:
        return "#!/bin/sh\n# A real tool further down in PATH must not answer for this one.\nexit 127\n"
    sick = [index for index, gpu in enumerate(hardware.gpus) if gpu.is_sick or gpu.is_lost]
    said = "Detected more than 8 PCIe replays per minute"
    system = {"value": "Warning", "overflow": [said]}
    gpus = {str(at): {"value": "Warning", "children": {"Errors": {"children": {"PCIe system": system}}}} for at in sick}
    body = {
        "Overall Health": {"value": "Warning" if sick else "Healthy"},
        **({"GPU": {"children": gpus}} if sick else {}),
    }
    report = {"header": ["Health Monitor Report"], "body": body}
    results = [
        {"entity_group": "GPU", "entity_id": index, "status": "Fail", "warnings": [{"error_id": 1, "warning": said}]}
        if index in sick
        else {"entity_group": "GPU", "entity_id": index, "status": "Pass"}
        for index in range(len(hardware.gpus))
    ]
    tests = [{"name": "software", "results": results, "test_summary": {"status": "Fail" if sick else "Pass"}}]
    diag = {
        "DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": tests}]},
        "metadata": {"Driver Version Detected": hardware.driver, "version": "4.2.3"},
    }
    return (
        "#!/bin/sh\n# Stands in for dcgmi on a rehearsal node.\ncase $* in\n"
        f"    'health -c -j') cat <<'END' ;;\n{json.dumps(report, indent=1)}\n"
        f"END\n    'diag -r 1 -j') cat <<'END' && exit {226 if sick else 0} ;;\n{json.dumps(diag, indent=1)}\nEND\n"
        "esac\n"
    )


def _node_texts(hardware: Hardware) -> dict[str, str]:
    """What tells of the node as a whole: limits, processes, drivers, the GPUs' part of the kernel log."""
    # A testbed cannot raise the real limit: that takes a capability that root in a container may lack.
    limits = Path("/proc/self/limits").read_text(encoding="ascii")
    unlimited = r"\1unlimited            unlimited            bytes"
    driver = f"NVIDIA UNIX Open Kernel Module for x86_64  {hardware.driver}  Release Build"
    lines = ["Linux version 5.15.0-126-generic", f"NVRM: loading {driver}", *_gpu_log(hardware)]
    texts = {
        "proc/self/limits": re.sub(r"(?m)^(Max locked memory +).*$", unlimited, limits),
        "etc/cdi/nvidia.yaml": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n",
        "proc/uptime": "864000.00 1728000.00\n",
        "proc/driver/nvidia/version": f"NVRM version: {driver}\n",
        # Without the symbol of DMA-BUF, whatever kernel the rehearsal runs on.
        "proc/kallsyms": "0000000000000000 T vfs_read\n",
        "sys/module/nvidia/initstate": "live\n",
        "var/log/kernel-gpus.log": "".join(f"[{12 * k:5d}.000000] {line}\n" for k, line in enumerate(lines)),
    }
    if "no_peermem" not in hardware.flags:
        texts["sys/module/nvidia_peermem/version"] = "550.54.15\n"
    names = {gpu.pid: "python3" for gpu in hardware.gpus if gpu.pid is not None} | {1: "systemd"}
    if "no_fabric_manager" not in hardware.flags:
        names[_FABRIC_MANAGER_PID] = "nv-fabricmanage"
    for pid, name in names.items():
        # The fields between name and start do not matter; a start at 86400 s is nine days of age.
        stat = f"{pid} ({name}) S 1 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 8640000 0 0\n"
        texts |= {f"proc/{pid}/comm": f"{name}\n", f"proc/{pid}/stat": stat}
    return texts


def _gpu_log(hardware: Hardware) -> Iterator[str]:
    for gpu in hardware.gpus:
        where = f"NVRM: Xid (PCI:{gpu.address[:-2]})"
        if gpu.is_lost:
            yield f"{where}: 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
            yield f"NVRM: GPU {gpu.address}: GPU has fallen off the bus."
        if gpu.xid is not None:
            yield f"{where}: {gpu.xid}, pid=2503421, name=python3, Ch 00000008"
    if "sxid" in hardware.flags:
        switch = f"0000:{_FIRST_NVSWITCH_BUS:02x}:00.0"
        yield f"nvidia-nvswitch0: SXid (PCI:{switch}): 20034, Fatal, Link 30 LTSSM Fault Up"


def _fabric_log(adapters: Iterable[Adapter]) -> Iterator[str]:
    yield "[    0.000000] Linux version 5.15.0-105-generic (build@host) (gcc 11.4.0) #115-Ubuntu SMP"
    for adapter in adapters:
        name, full = f"mlx5_core {adapter.path[-1]}", 504.112 if adapter.speed.startswith("32") else 252.048
        told = f"{name}: {full * adapter.width / 16:.3f} Gb/s available PCIe bandwidth"
        if adapter.width < 16:
            wide = f"(capable of {full:.3f} Gb/s with {adapter.speed} x16 link)"
            told += f", limited by {adapter.speed} x{adapter.width} link at {adapter.path[-2]} {wide}"
        yield f"[   12.100100] {told}"
        if adapter.is_up:
            yield f"[   21.500000] {name} {adapter.netdev}: Link up"
        # In the last hours of the ten days that the node has been up.
        for turn in range(3 if adapter.is_flapping else 0):
            yield f"[{860000 + 60 * turn}.000000] {name} {adapter.netdev}: Link down"
            yield f"[{860001 + 60 * turn}.000000] {name} {adapter.netdev}: Link up"


def _devices(hardware: Hardware) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """PCI path and files of every device."""
    model = hardware.model
    for gpu in hardware.gpus:
        ids = {"vendor": "0x10de", "device": model.pci_device, "class": "0x030200"}
        yield gpu.path, ids | _link(gpu.numa_node, gpu.width, 16, model.pcie_speed)
    for k in range(model.nvswitches):
        ids = {"vendor": "0x10de", "device": model.nvswitch_device, "class": "0x068000"}
        yield ("0000:f8:01.0", f"0000:{_FIRST_NVSWITCH_BUS + k:02x}:00.0"), ids | _link(0, 2, 2, model.pcie_speed)
    for adapter in hardware.adapters:
        if adapter.is_there:
            ids = {"vendor": "0x15b3", "class": "0x020000" if adapter.link_layer == "Ethernet" else "0x020700"}
            yield adapter.path, ids | _link(adapter.numa_node, adapter.width, 16, adapter.speed)


def _link(numa_node: int, width: int, max_width: int, speed: str) -> dict[str, object]:
    widths = {"current_link_width": width, "max_link_width": max_width}
    return {"numa_node": numa_node, **widths, "current_link_speed": speed, "max_link_speed": speed}


def _add_adapter(adapter: Adapter, number: int, texts: dict[str, str], links: dict[str, str]) -> None:
    """The adapter and its interface below the PCI device, and the links of /sys/class to them."""
    if not adapter.has_driver:
        return
    device = pci_folder(adapter.path)
    verbs, netdev = f"{device}/infiniband/{adapter.name}", f"{device}/net/{adapter.netdev}"
    links |= {f"sys/class/infiniband/{adapter.name}": verbs, f"{verbs}/device": device}
    links |= {f"sys/class/net/{adapter.netdev}": netdev, f"{netdev}/device": device}
    port = {
        **dict.fromkeys(_COUNTERS, "0"),
        "counters/link_downed": str(adapter.link_downed),
        "state": adapter.state,
        "phys_state": adapter.phys_state,
        "rate": adapter.rate,
        "link_layer": adapter.link_layer,
        **_gids(adapter, number),
    }
    interface = {
        "mtu": str(adapter.mtu),
        "operstate": "up" if adapter.is_up else "down",
        "carrier": str(int(adapter.is_up)),
        "speed": adapter.rate.split(" ", 1)[0] + "000",
        "type": "1" if adapter.link_layer == "Ethernet" else "32",
        "dev_port": "0",
        **({"bonding/mode": "802.3ad 4"} if adapter.is_bond else {}),
    }
    texts |= {f"{verbs}/ports/1/{name}": f"{text}\n" for name, text in port.items()}
    texts |= {f"{netdev}/{name}": f"{text}\n" for name, text in interface.items()}
    if adapter.is_growing:
        counters = f"sys-second/class/infiniband/{adapter.name}/ports/1/counters"
        texts |= {f"{counters}/symbol_error": "4711\n", f"{counters}/port_rcv_errors": "12\n"}


def _gids(adapter: Adapter, number: int) -> dict[str, str]:
    bus = adapter.path[-1][5:7]
    local = f"fe80:0000:0000:0000:5200:{number:04x}:00{bus}:0001"
    if adapter.link_layer != "Ethernet":
        return {"gids/0": local, "gid_attrs/types/0": "IB/RoCE v1", "gids/1": ":".join(["0000"] * 8)}
    mapped = f"0000:0000:0000:0000:0000:ffff:0a{bus}:{number:04x}"
    texts: dict[str, str] = {}
    for index, (address, kind) in enumerate((one, v) for one in (local, mapped) for v in ("IB/RoCE v1", "RoCE v2")):
        texts |= {f"gids/{index}": address, f"gid_attrs/types/{index}": kind}
        texts[f"gid_attrs/ndevs/{index}"] = adapter.netdev
    return texts
