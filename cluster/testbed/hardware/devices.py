"""What a rehearsal node has: GPUs and adapters, where they sit on the PCI bus, and what is wrong with them.

Machines, the fields of a healthy GPU and adapter, and faults, which change them, are data: hardware.yaml. GPU k and the
adapter of its rail sit below one PCI switch: on an h100x8 or h200x8 every GPU has an adapter of its own, on an a100x8
two GPUs share one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.errors import ConfigError

NO_HARDWARE = "none"
Fields = dict[str, Any]  # of a GPU or an adapter, as hardware.yaml names them, with its PCI `path`


@dataclass
class Hardware:
    """The hardware of one node. model: its row in hardware.yaml. flags: faults of the node as a whole."""

    model: Mapping[str, Any]
    gpus: list[Fields]
    adapters: list[Fields]
    driver: str
    flags: set[str] = field(default_factory=set)


@functools.cache
def hardware_table(name: str) -> Any:
    """One of the tables of hardware.yaml: `models` by the names of `--hardware`, `faults` by name, ..."""
    import yaml  # not where tests run with nothing but the engine's packages

    return yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))[name]


def build_hardware(profile: str, number: int, wrong: Iterable[str]) -> Hardware:
    """What the testbed's `number`-th node, from 1, has; `wrong` are `NAME` or `NAME:VALUE` of `faults`, and `railN`
    stands for the compute adapter number N from 0. Raises ConfigError for a fault that makes no sense.
    """
    model, healthy = hardware_table("models")[profile], hardware_table("gpu")
    gpus = [{**healthy, "path": gpu_path(profile, k), "numa_node": k // 4} for k in range(len(model["gpu_buses"]))]
    hardware = Hardware(model, gpus, _adapters(profile, number), model["driver"])
    for fault in wrong:
        _apply(hardware, fault)
    if "roce" in hardware.flags:
        for one in hardware.adapters:
            if one["rail"] is not None:
                one.update(link_layer="Ethernet", netdev=f"rdma{one['rail']}")
    return hardware


def gpu_path(profile: str, index: int) -> tuple[str, ...]:
    """PCI addresses from the root port to GPU `index`, the GPU last."""
    model = hardware_table("models")[profile]
    rail, slot = divmod(index, len(model["gpu_buses"]) // len(model["switches"]))
    return _path(model["switches"][rail], slot, model["gpu_buses"][index])


def compute_adapters(profile: str, number: int) -> tuple[str, ...]:
    """Names of the adapters of node `number` (from 1) that training uses, in the order of the GPUs they sit beside."""
    rails, sisters = len(hardware_table("models")[profile]["switches"]), hardware_table("sisters")
    numbers = sisters[(number - 1) % len(sisters)] if rails == len(sisters[0]) else range(rails)
    return tuple(f"mlx5_{one}" for one in numbers)


def _path(switch: str, slot: int, bus: str) -> tuple[str, ...]:
    """From the root port of a PCI switch to the only device of a bus."""
    root = int(switch, 16)
    return f"0000:{root:02x}:01.0", f"0000:{root + 1:02x}:00.0", f"0000:{root + 2:02x}:{slot:02x}.0", f"0000:{bus}:00.0"


def _adapters(profile: str, number: int) -> list[Fields]:
    """Healthy ones; those that training uses first. A machine with a rail per GPU has others, too."""
    model, names = hardware_table("models")[profile], compute_adapters(profile, number)
    healthy = {**hardware_table("adapter"), "rate": model["adapter_rate"], "speed": model["pcie_speed"]}
    places = zip(names, model["switches"], model["adapter_buses"], strict=True)
    found = [
        {**healthy, "name": name, "path": _path(switch, 8, bus), "rail": rail, "netdev": f"ib{rail}"}
        for rail, (name, switch, bus) in enumerate(places)
    ]
    for rail, one in enumerate(found):
        one["numa_node"] = rail * 2 // len(found)
    spare = [f"mlx5_{one}" for one in range(12) if f"mlx5_{one}" not in names]
    for slot, (name, more) in enumerate(zip([*spare, "mlx5_bond_0"], hardware_table("spares"), strict=False)):
        path = f"0000:e0:{slot + 1:02x}.0", f"0000:{0xE1 + slot:02x}:00.0"
        if len(names) == len(model["gpu_buses"]):
            found.append({**healthy, "name": name, "path": path, "rail": None, "numa_node": 1, **more})
    return found


def _apply(hardware: Hardware, fault: str) -> None:
    name, _, value = fault.partition(":")
    if name not in hardware_table("faults"):
        raise ConfigError(f"no fault {fault!r} of hardware; there are {', '.join(hardware_table('faults'))}")
    kind = hardware_table("faults")[name]
    if "adapter" in kind:
        named = [one for one in hardware.adapters if value in (one["name"], f"rail{one['rail']}")]
        if not named:
            names = ", ".join(one["name"] for one in hardware.adapters)
            raise ConfigError(f"fault {fault!r}: no adapter {value!r} on this node; there are {names}")
        named[0].update(kind["adapter"])
        return
    found = re.fullmatch(kind.get("value", ""), value)
    index = int(found[1] or 0) if found and "gpu" in kind else 0
    if found is None or (":" in fault) != ("value" in kind) or index >= len(hardware.gpus):
        raise ConfigError(f"{fault!r} makes no sense ({len(hardware.gpus)} GPUs). {name}: {kind['help']}")
    if "gpu" in kind:
        hardware.gpus[index].update(kind["gpu"])
    if name == "xid":
        hardware.gpus[index]["xid"] = value.partition(":")[0]
    elif name == "driver":
        hardware.driver = value
    elif "gpu" not in kind:
        hardware.flags.add(name)
