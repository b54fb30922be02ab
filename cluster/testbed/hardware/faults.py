"""What can be wrong with the hardware of a rehearsal node: one table, and what it makes of a healthy one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.testbed.hardware.profiles import MODELS, Adapter, Gpu, Model, healthy_adapters, healthy_gpus
from engine.config.errors import ConfigError

BUSY_PID = 424242


@dataclass(frozen=True)
class Fault:
    """One kind. help: begins with what its value is, if it has one; changes: fields of the GPU or adapter."""

    help: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """`GPU N`, `DEV`, `VERSION`, `CODE or CODE:N`; empty for the whole node."""
        return self.help.partition(": ")[0] if ": " in self.help else ""


FAULTS: Mapping[str, Fault] = {
    "gpu_lost": Fault("GPU N: Xid 79 in the kernel log, and every nvidia-smi ends with an error", {"is_lost": True}),
    "gpu_absent": Fault("GPU N: on PCI, not listed by nvidia-smi", {"is_listed": False}),
    "ecc": Fault("GPU N: two uncorrectable errors since the driver loaded", {"uncorrectable": 2}),
    "remap_pending": Fault("GPU N: a row remapping that waits for a reset", {"remap_pending": "Yes"}),
    "busy": Fault("GPU N: in use by a process of root", {"used_mib": 71680, "pid": BUSY_PID}),
    "ghost": Fault("GPU N: memory in use without a process", {"used_mib": 20480}),
    "throttle": Fault(
        "GPU N: slowed down by the hardware because of heat", {"throttled": ("hw_slowdown", "hw_thermal_slowdown")}
    ),
    "pcie_width": Fault("GPU N: 8 lanes instead of 16", {"width": 8}),
    "nvlink_down": Fault("GPU N: NVLink 5 inactive", {"inactive_link": 5}),
    "xid": Fault("CODE or CODE:N: that Xid in the kernel log, of GPU 0 or N"),
    "dcgm": Fault("GPU N: DCGM's health monitor warns of it, its diagnostic fails it", {"is_sick": True}),
    "driver": Fault("VERSION: another driver"),
    "sxid": Fault("a fatal error of the first NVSwitch in the kernel log"),
    "no_fabric_manager": Fault("NVSwitches without the daemon that sets them up"),
    "smi_hangs": Fault("a nvidia-smi that never ends"),
    "smi_truncated": Fault("a nvidia-smi that breaks off"),
    "smi_missing": Fault("no nvidia-smi"),
    "no_dcgm": Fault("no dcgmi"),
    "port_down": Fault(
        "DEV: its port is down and switched off, while its rate still reads 40 Gb/s",
        {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "40 Gb/sec (4X QDR)"},
    ),
    "polling": Fault(
        "DEV: its port looks for the other end of the cable",
        {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"},
    ),
    "slow_port": Fault("DEV: its port came up at 100 Gb/s", {"rate": "100 Gb/sec (4X EDR)"}),
    "narrow_pcie": Fault("DEV: it has 8 of its 16 PCIe lanes, and the kernel said so", {"width": 8}),
    "flapping": Fault("DEV: its link went down and up three times", {"is_flapping": True}),
    "counters": Fault("DEV: its link_downed stands at 255, the end of that counter", {"link_downed": 255}),
    "growing": Fault("DEV: errors are being counted right now", {"is_growing": True}),
    "driverless": Fault("DEV: it is on the PCI bus, but no driver offers it", {"has_driver": False}),
    "gone": Fault("DEV: it is nowhere", {"is_there": False}),
    "roce": Fault("compute ports speak Ethernet (RoCE v2)"),
    "no_peermem": Fault("no module lets adapters reach GPU memory"),
}


@dataclass
class Hardware:
    """The hardware of one node. flags: faults of the node as a whole."""

    model: Model
    gpus: list[Gpu]
    adapters: list[Adapter]
    driver: str
    flags: set[str] = field(default_factory=set)


def build_hardware(profile: str, node: str, number: int, faults: Iterable[str]) -> Hardware:
    """What `node`, the testbed's `number`-th from 1, has; `faults` are `NAME` or `NAME:VALUE` of FAULTS, and `railN`
    stands for the compute adapter number N from 0. Raises ConfigError for a profile or fault that makes no sense.
    """
    model = MODELS.get(profile)
    if model is None:
        raise ConfigError(f"no hardware profile {profile!r}; there are {', '.join(MODELS)} and none")
    hardware = Hardware(model, healthy_gpus(model, node), healthy_adapters(profile, number), model.driver)
    for fault in faults:
        _apply(hardware, fault)
    if "roce" in hardware.flags:
        hardware.adapters = [one if one.rail is None else one.as_ethernet() for one in hardware.adapters]
    return hardware


def _apply(hardware: Hardware, fault: str) -> None:
    name, _, value = fault.partition(":")
    kind = FAULTS.get(name)
    if kind is None:
        raise ConfigError(f"no fault {fault!r} of hardware; there are {', '.join(FAULTS)}")
    if kind.about == "" and ":" not in fault:
        hardware.flags.add(name)
    elif kind.about == "VERSION" and re.fullmatch(r"[0-9]+(\.[0-9]+)*", value):
        hardware.driver = value
    elif kind.about.startswith("CODE") and (found := re.fullmatch(r"([0-9]+)(?::([0-9]+))?", value)):
        _change(hardware.gpus, _gpu(hardware, found[2] or "0", fault), {"xid": found[1]})
    elif kind.about == "GPU N":
        _change(hardware.gpus, _gpu(hardware, value, fault), kind.changes)
    elif kind.about == "DEV":
        named = [k for k, one in enumerate(hardware.adapters) if value in (one.name, f"rail{one.rail}")]
        if not named:
            names = ", ".join(one.name for one in hardware.adapters)
            raise ConfigError(f"fault {fault!r}: no adapter {value!r} on this node; there are {names}")
        _change(hardware.adapters, named[0], kind.changes)
    else:
        raise _nonsense(hardware, fault)


def _gpu(hardware: Hardware, text: str, fault: str) -> int:
    if not text.isdecimal() or int(text) >= len(hardware.gpus):
        raise _nonsense(hardware, fault)
    return int(text)


def _nonsense(hardware: Hardware, fault: str) -> ConfigError:
    name = fault.partition(":")[0]
    return ConfigError(f"{fault!r} makes no sense ({len(hardware.gpus)} GPUs). {name}: {FAULTS[name].help}")


def _change(devices: list[Any], index: int, changes: Mapping[str, Any]) -> None:
    devices[index] = replace(devices[index], **changes)
