"""The network of a node: its interfaces, and which of them the nodes talk over; its InfiniBand and RoCE adapters."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.remote_text import one_line
from cluster.survey.section import Section, UnreadableError, fill, listed, python_question

# What container engines and hypervisors make for themselves; other machines cannot be reached over it.
_INTERNAL_NAME = re.compile(
    r"(docker|virbr|veth|cni|flannel|cali|cilium|lxc|lxd|podman|kube|tun|tap|vnet|dummy|ifb|br-[0-9a-f]{12})"
)
_INTERNAL_KINDS = frozenset({"tun", "tunnel", "vxlan", "wireguard", "can"})

# From the kernel itself, in the node's own network namespace; no tool is needed. Addresses come by RTM_GETADDR (see
# rtnetlink(7)), for SIOCGIFADDR tells the first one of an interface alone.
LINKS = python_question(
    "net.links",
    15,
    r"""
import fcntl, socket, struct, subprocess


def find_addresses():
    # IPv4 addresses with prefix length, by the index of their interface, in the order of the kernel.
    found, asking = {}, socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    asking.settimeout(5)
    asking.send(struct.pack("=IHHII", 24, 22, 0x301, 1, 0) + struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0))
    while True:
        data = asking.recv(1 << 20)
        while data:
            size, kind = struct.unpack_from("=IH", data)
            if kind == 2:
                sys.exit("the kernel does not tell the addresses of interfaces")
            if kind == 3:  # NLMSG_DONE
                return found
            length, _, _, index = struct.unpack_from("=xBBBI", data, 16)
            fields, attributes = data[24:size], {}
            while len(fields) >= 4:
                step, name = struct.unpack_from("=HH", fields)
                attributes[name] = fields[4:step]
                fields = fields[max(4, -(-step // 4) * 4) :]
            address = attributes.get(2) or attributes.get(1)  # IFA_LOCAL, for of a tunnel IFA_ADDRESS is the other end
            if address:
                found.setdefault(index, []).append("%s/%d" % (socket.inet_ntoa(address), length))
            data = data[-(-size // 4) * 4 :]


types = {"1": "ether", "32": "infiniband", "772": "loopback", "280": "can"}  # ARPHRD_* of the kernel
marks = {"bridge": "bridge", "bonding": "bond", "tun_flags": "tun"}
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
told, addresses = {"links": [], "routes": []}, find_addresses()
for number, name in socket.if_nameindex():
    folder = pathlib.Path("/sys/class/net", name)
    ask = lambda request: fcntl.ioctl(asking, request, name.encode().ljust(40, b"\0"))[16:]
    kinds = [kind for file, kind in marks.items() if (folder / file).exists()]
    kinds += [line[8:] for line in lines(folder / "uevent") if line.startswith("DEVTYPE=")]
    link = {"name": name, "kind": [*kinds, types.get(tell(folder / "type"), "tunnel")][0]}
    link["mtu"] = int(tell(folder / "mtu") or 0) or None
    link["is_up"] = int.from_bytes(ask(0x8913)[:2], "little") & 65 == 65  # SIOCGIFFLAGS: IFF_UP, IFF_RUNNING
    link["master"] = (folder / "master").resolve().name if (folder / "master").exists() else None
    link["addresses"] = addresses.get(number, [])
    told["links"].append(link)
for row in pathlib.Path("/proc/net/route").read_text().splitlines()[1:]:
    device, to, gateway, _, _, _, metric, mask = row.split()[:8]
    told["routes"].append([device, to == mask == "00000000", gateway != "00000000", int(metric)])
try:  # the kernel lists its main table alone; rails have tables of their own
    said = subprocess.run(["ip", "-4", "route", "show", "table", "all"], stdout=subprocess.PIPE, text=True).stdout
    told["routes"] += [[device, False, True, 0] for device in set(re.findall(r"\bvia .*?\bdev (\S+)", said))]
except OSError:
    pass
# One start of one kernel, seen from one network namespace: what shares both is one machine, under whatever name.
boot = tell(pathlib.Path("/proc/sys/kernel/random/boot_id"))
told["machine"] = "%s %s" % (boot, os.readlink("/proc/self/ns/net")) if boot else ""
print(json.dumps(told))
""",
)


@dataclass(frozen=True)
class NetInterface:
    """One network interface. addresses: all its IPv4 addresses with prefix length, `10.0.0.1/24`. kind: ether,
    loopback, infiniband, bridge, bond, veth, tun, vlan, ... is_default_route: IPv4 packets to unknown places leave
    here. master: the bridge or bond that it is a part of. is_up: switched on, and the link is there.

    Raises ValueError for a name or address that is none.
    """

    name: str
    is_up: bool
    mtu: int | None = None
    kind: str = "ether"
    addresses: tuple[str, ...] = ()
    is_default_route: bool = False
    master: str | None = None

    def __post_init__(self) -> None:
        for name in (self.name, self.master or "-"):
            if not re.fullmatch(r"[^\s/]{1,15}", name):
                raise ValueError(f"{name!r} is no name of an interface")
        for address in self.addresses:
            ipaddress.IPv4Interface(address)

    @property
    def address(self) -> str | None:
        """The first address, with prefix length, that it did not give itself (169.254.0.0/16); None without one."""
        return next((one for one in self.addresses if not ipaddress.IPv4Interface(one).is_link_local), None)


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface that the nodes talk over, or None, and why."""

    interface: NetInterface | None
    reason: str

    @property
    def address(self) -> str | None:
        """The IPv4 address at which other nodes reach this one."""
        address = self.interface.address if self.interface is not None else None
        return address.partition("/")[0] if address is not None else None


@dataclass(frozen=True)
class Network:
    """What section `net.links` says. gateways: interfaces by which an IPv4 route leads to a gateway.

    machine: boot id of the kernel and network namespace; "" where the kernel hides the first. Cloned images share
    /etc/machine-id, and containers and testbed nodes of one machine share the boot id, so neither would do alone.
    """

    interfaces: tuple[NetInterface, ...]
    gateways: frozenset[str]
    machine: str = ""


def read_network(section: Section) -> Network:
    """Every interface of the node, in its order. Raises UnreadableError when links or routes cannot be believed."""

    def take(told: Any) -> Network:
        routes = fill(tuple[tuple[str, bool, bool, int], ...], told["routes"])
        best = min((metric for _, is_default, _, metric in routes if is_default), default=0)
        default = {name for name, is_default, _, metric in routes if is_default and metric == best}
        links = [{**row, "is_default_route": row["name"] in default} for row in listed(told["links"])]
        interfaces = fill(tuple[NetInterface, ...], links)
        if not interfaces:
            raise ValueError("no interface at all, not even lo")
        gateways = frozenset(name for name, _, has_gateway, _ in routes if has_gateway)
        return Network(interfaces, gateways, one_line(str(told.get("machine", "")), 120))

    return section.read(take)


def explain_interface(interfaces: Iterable[NetInterface], wanted: str | None = None) -> InterfaceChoice:
    """The interface named `wanted`, else that of the default route, else the only one that fits, and why.

    Never lo, never one without IPv4 or link, and never one that a container engine or hypervisor made for itself.
    """
    interfaces = tuple(interfaces)
    if wanted is not None:
        named = next((interface for interface in interfaces if interface.name == wanted), None)
        if named is None:
            return InterfaceChoice(None, f"there is no interface {wanted}; there are {_names(interfaces)}")
        trouble = unfit(named)
        return InterfaceChoice(None if trouble else named, trouble or "named by cluster.interface")
    fitting = [interface for interface in interfaces if not unfit(interface)]
    for interface in fitting:
        if interface.is_default_route:
            return InterfaceChoice(interface, "the default route leaves here")
    # A bridge that leads nowhere by default is a network of this machine only.
    fitting = [interface for interface in fitting if interface.kind != "bridge"]
    if len(fitting) == 1:
        return InterfaceChoice(fitting[0], "the only interface with a link and an IPv4 address")
    if fitting:
        return InterfaceChoice(None, f"{_names(fitting)} would do and none has the default route")
    return InterfaceChoice(None, f"none of {_names(interfaces)} has a link and an IPv4 address that others can reach")


def unfit(interface: NetInterface) -> str:
    """Why nodes cannot talk over `interface`; empty when they can."""
    name = interface.name
    if interface.kind == "loopback" or name == "lo":
        return f"{name} does not leave the machine"
    if _INTERNAL_NAME.match(name) or interface.kind in _INTERNAL_KINDS:
        return f"{name} ({interface.kind}) belongs to containers or virtual machines on this node"
    if interface.master:
        return f"{name} is a part of {interface.master}"
    if not interface.is_up:
        return f"{name} is down"
    if not interface.addresses:
        return f"{name} has no IPv4 address"
    if interface.address is None:
        return f"{name} has no IPv4 address but {interface.addresses[0]}, which it gave itself"
    return ""


def _names(interfaces: Sequence[NetInterface]) -> str:
    shown = ", ".join(interface.name for interface in interfaces[:12])
    return f"{shown}, ..." if len(interfaces) > 12 else shown or "nothing"


_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_IPV4_GID = re.compile(r"(0000:){5}ffff:[0-9a-f]{4}:[0-9a-f]{4}")
_STATE = re.compile(r"\d+: *([A-Za-z_]+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s\b")
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})

PORTS = python_question(
    "ib.ports",
    25,
    r"""
routes = [line.split()[:2] for line in lines(root / "proc/net/route")]
defaults = [route[0] for route in routes if route[1:] == ["00000000"]]
told = {"ports": [], "broken": {}}
# None of these grows on a sound link, not within a second.
counters = ("link_downed", "link_error_recovery", "symbol_error", "local_link_integrity_errors", "port_rcv_errors")
counters += ("port_rcv_remote_physical_errors", "excessive_buffer_overrun_errors")


def find_netdev(device, number):
    # What the first GID of the port is tied to, else the interface that counts as that port of the device. A partition
    # of InfiniBand (ib0.8001) has a parent; the device's own interface has none.
    tied = tell(device / "ports" / number / "gid_attrs/ndevs/0")
    folders = [one for one in sorted(device.glob("device/net/*")) if not (one / "parent").exists()]
    return tied or next((one.name for one in folders if int(tell(one / "dev_port") or 0) == int(number) - 1), "")


def find_ways(name):
    # Bonds, bridges and VLANs that an interface is below have its packets, too.
    found = [name] if name else []
    for one in found:
        above = [file.name[6:] for file in (root / "sys/class/net" / one).glob("upper_*")]
        found += [name for name in sorted(above) if name not in found]
    return found


def count(port, tree="sys"):
    # A rehearsal tree may hold what has grown meanwhile in a second tree beside sys.
    files = {name: root / tree / port.relative_to(root / "sys") / "counters" / name for name in counters}
    return {name: int(tell(file)) for name, file in files.items() if tell(file).isdecimal()}


for device in sorted(root.glob("sys/class/infiniband/*")):
    ports = sorted(device.glob("ports/*"))
    for port in ports:
        one = {"device": device.name, "port": port.name, "path": place(device / "device"), "counted": count(port)}
        one.update((name, tell(port / name)) for name in ("state", "phys_state", "rate", "link_layer"))
        for name in ("numa_node", "current_link_width", "max_link_width", "current_link_speed"):
            one[name] = tell(device / "device" / name)
        one["is_iwarp"] = tell(device / "node_type").endswith("RNIC")
        one["has_counters"] = (port / "counters").is_dir()
        one["is_virtual_function"] = (device / "device/physfn").exists()
        one["netdev"] = netdev = find_netdev(device, port.name)
        folder = root / "sys/class/net" / (netdev or "none")
        one["is_bond"] = (folder / "master").exists() or (folder / "bonding").exists()
        one["ways"], one["mtu"] = find_ways(netdev), tell(folder / "mtu")
        one["default_route"] = next((way for way in one["ways"] if way in defaults), "")
        gids = {str(index): tell(port / "gids" / str(index)) for index in range(32)}
        types = port / "gid_attrs/types"
        one["gids"] = {index: [tell(types / index), gid] for index, gid in gids.items() if gid.strip("0:")}
        told["ports"].append(one)
    if not ports:
        told["broken"][device.name] = "the adapter shows no port"
for device in sorted(root.glob("sys/bus/pci/devices/*")):
    # An InfiniBand adapter; without that folder no driver offers it.
    if tell(device / "class").startswith("0x0207") and not (device / "infiniband").is_dir():
        told["broken"][device.name] = "the InfiniBand adapter has no driver"
time.sleep(float(os.environ.get("BURST_COUNT_S") or 0) if told["ports"] else 0)
for one in told["ports"]:
    port = root / "sys/class/infiniband" / one["device"] / "ports" / one["port"]
    later = {**count(port), **count(port, "sys-second")}
    one["errors"] = {name: later[name] - value for name, value in one.pop("counted").items() if name in later}
print(json.dumps(told))
""",
)

GPUDIRECT = python_question(
    "ib.gpudirect",
    15,
    r"""
peers = ["sys/module/nvidia_peermem/version", "sys/kernel/mm/memory_peers/nv_mem/version"]
peers.append("sys/kernel/mm/memory_peers/nv_mem_nc/version")
module = (root / "sys/module/nvidia").exists()
symbols = lines(root / "proc/kallsyms") if module else []  # long
print(
    json.dumps(
        {
            "peers": ["/" + name for name in peers if (root / name).exists()],
            "module": module,
            # Only the open kernel modules of NVIDIA export DMA-BUF; its first line names them.
            "driver": tell(root / "proc/driver/nvidia/version"),
            "dmabuf": any(" ib_umem_dmabuf_get" in one for one in symbols) if symbols else None,
        }
    )
)
""",
)


@dataclass(frozen=True)
class HcaPort:
    """One port of one InfiniBand or RoCE adapter, from /sys/class/infiniband.

    device, port: `mlx5_0`, 1. link_layer: InfiniBand or Ethernet. state: ACTIVE, DOWN, INIT, ... phys_state: LinkUp,
    Polling, Disabled, ... rate_gbps: what is set up now. pci_path: PCI addresses from the root complex to the adapter
    (`0000:00:01.0`, ..., the adapter last). netdev: its network interface. ways: that, and the bonds, bridges and VLANs
    above it; default_route: the one of them that has it. gids: index -> (type, address). pcie_gts: GT/s per lane.
    mtu: of netdev. errors: by how much each error counter that can be read grew in BURST_COUNT_S. has_counters: whether
    the kernel makes the folder of these counters. None, or "" for a state: not told.

    is_iwarp: RDMA over TCP. Its link layer is Ethernet, too; only the node type tells it apart (`4: RNIC`, see
    include/rdma/ib_verbs.h of the kernel: siw, cxgb4, irdma and qedr in that mode).
    """

    device: str
    port: int
    link_layer: str
    state: str
    phys_state: str
    rate_gbps: float | None = None
    pci_path: tuple[str, ...] = ()
    netdev: str | None = None
    numa_node: int | None = None
    is_virtual_function: bool = False
    is_bond: bool = False
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    gids: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    ways: tuple[str, ...] = ()
    default_route: str = ""
    pcie_gts: float | None = None
    mtu: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    has_counters: bool = True
    is_iwarp: bool = False

    @property
    def is_active(self) -> bool:
        """Whether traffic can pass: the link is up, and the port was set up (by a subnet manager, or as Ethernet)."""
        return self.state == "ACTIVE" and self.phys_state == "LinkUp"

    @property
    def pci_address(self) -> str | None:
        """Where the adapter itself sits."""
        return self.pci_path[-1] if self.pci_path else None

    @property
    def name(self) -> str:
        """`mlx5_0:1`, as NCCL_IB_HCA spells it."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True)
class Adapters:
    """Section `ib.ports`. broken: adapters that show no port, or PCI addresses of those without driver -> which."""

    ports: tuple[HcaPort, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuDirect:
    """Section `ib.gpudirect`: what NCCL looks at before it lets adapters reach GPU memory.

    peer_memory: the file of a peer memory module, None without one. has_driver: whether a driver of NVIDIA is loaded.
    has_dmabuf: whether it is made of the open modules, and the kernel exports DMA-BUF; None: the kernel hides that.
    """

    peer_memory: str | None
    has_driver: bool
    has_dmabuf: bool | None

    @property
    def works(self) -> bool | None:
        """Whether there is a way; None: not known."""
        return True if self.peer_memory is not None else self.has_dmabuf


def parse_adapters(section: Section) -> Adapters:
    """The adapters of section `ib.ports`. Raises UnreadableError."""

    def take(told: Any) -> Adapters:
        ports = [_port(row) for row in listed(told["ports"])]
        if len({port.name for port in ports}) < len(ports):
            raise ValueError("a port comes twice")
        broken = {_device(name): one_line(text) for name, text in told["broken"].items()}
        return Adapters(tuple(ports), broken)

    return section.read(take)


def parse_gpudirect(section: Section) -> GpuDirect:
    """What section `ib.gpudirect` says. Raises UnreadableError."""

    def take(told: Any) -> GpuDirect:
        driver, dmabuf = str(told["driver"]), told["dmabuf"]
        return GpuDirect(
            peer_memory=next(map(str, told["peers"]), None),
            has_driver=told["module"] is True or bool(driver),
            has_dmabuf=(dmabuf if dmabuf in (True, None) else False) if "Open Kernel Module" in driver else False,
        )

    return section.read(take)


def pci_path(path: str) -> tuple[str, ...]:
    """The PCI addresses in a path below /sys/devices, from the root complex down; () when there are none."""
    return tuple(part for part in path.lower().split("/") if _ADDRESS.fullmatch(part))


def has_roce_gid(port: HcaPort) -> bool:
    """Whether `port` has a GID of RoCE v2 over IPv4: `0000:...:0000:ffff:0a00:0001` is 10.0.0.1."""
    return any(kind == "RoCE v2" and _IPV4_GID.fullmatch(gid) for kind, gid in port.gids.values())


def _port(row: Mapping[str, Any]) -> HcaPort:
    """Raises ValueError, KeyError and TypeError."""
    port: HcaPort = fill(
        HcaPort,
        {
            **row,
            "device": _device(row["device"]),
            "port": int(row["port"]),
            "state": _matched(_STATE, row["state"]) or "",
            "phys_state": _matched(_STATE, row["phys_state"]) or "",
            "rate_gbps": _number(_RATE, row["rate"]),
            "pci_path": [*pci_path(row["path"])],
            "netdev": row["netdev"] or None,
            "numa_node": integer(row["numa_node"]),
            "is_bond": row["is_bond"] or "bond" in row["device"],
            "pcie_width": lanes(row["current_link_width"]),
            "pcie_width_max": lanes(row["max_link_width"]),
            "pcie_gts": _number(_SPEED, row["current_link_speed"]),
            "mtu": integer(row["mtu"]),
        },
    )
    return port


def _device(name: str) -> str:
    """The name of an adapter, or the PCI address of one. Raises ValueError."""
    if not _DEVICE.fullmatch(name) and not _ADDRESS.fullmatch(name):
        raise ValueError(f"{one_line(name)!r} is no name of an adapter")
    return name


def _matched(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.match(text)
    return found[1] if found else None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = _matched(pattern, text)
    return float(found) if found is not None and len(found) < 12 else None


def integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def lanes(text: str) -> int | None:
    """Lanes; None for what says nothing: 0, 63 and 255 are how the kernel and adapters write `unknown`."""
    width = integer(text)
    return width if width in _WIDTHS else None


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


# Servers of mounted network file systems, and the interface to each; the topology file that the node gives to NCCL, as
# images of cloud providers do in /etc/nccl.conf (Azure's ND series: NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml), for a
# virtual machine hides which adapter is near to which GPU. Order of places: NCCL's user guide, "Environment Variables".
CARRIERS = python_question(
    "env.carriers",
    20,
    r"""
import subprocess

networked = re.compile(r"nfs4?|lustre|ceph|cifs|smb3|beegfs.*|(fuse\.)?glusterfs")
told = {"storage": [], "cores": len(os.sched_getaffinity(0))}
own_file = pathlib.Path(os.environ.get("NCCL_CONF_FILE") or "~/.nccl.conf").expanduser()
names = ["NCCL_TOPO_FILE=" + os.environ.get("NCCL_TOPO_FILE", ""), *lines(own_file), *lines(root / "etc/nccl.conf")]
found = [line.partition("=")[2].strip() for line in names if line.partition("=")[0].strip() == "NCCL_TOPO_FILE"]
told["topology"] = topology = next(filter(None, found), "")
told["has_topology"] = topology.startswith("/") and (root / topology[1:]).is_file()
for source, folder, kind, options, *_ in mounts(root / "proc/mounts"):
    if networked.fullmatch(kind) and len(told["storage"]) < 32:
        given = re.search(r"(?:^|,)addr=([^,]*)", options)
        server = given[1] if given else re.split("[:@/,]", source.lstrip("/"))[0]
        route = subprocess.run(["ip", "-o", "-4", "route", "get", server], capture_output=True).stdout.decode()
        told["storage"] += [[folder, server, way] for way in re.findall(r"\bdev (\S+)", route)[:1] if way != "lo"]
print(json.dumps(told))
""",
)


@dataclass(frozen=True)
class StorageRoute:
    """A network file system that the node has mounted, and the interface by which it reaches the server."""

    mount_point: str
    server: str
    interface: str


@dataclass(frozen=True)
class Carriers:
    """Section `env.carriers`. cores: CPUs of a login. trouble: why all this is not known.

    topology: the NCCL_TOPO_FILE that the node sets, "" for none. has_topology: whether the node has that file.
    """

    storage: tuple[StorageRoute, ...] = ()
    cores: int | None = None
    trouble: str = ""
    topology: str = ""
    has_topology: bool = False


def read_carriers(section: Section) -> Carriers:
    """What the node says; where it cannot be read, a remark."""

    def take(told: Any) -> Carriers:
        routes = (StorageRoute(*(one_line(word) for word in row)) for row in listed(told["storage"]))
        topology = one_line(str(told.get("topology", "")), 4096)
        has_topology = told.get("has_topology") is True
        return Carriers(tuple(routes), int(told["cores"]), topology=topology, has_topology=has_topology)

    try:
        return section.read(take)
    except UnreadableError as error:
        return Carriers(trouble=f"ports that lead to storage servers are not known: {error}")
