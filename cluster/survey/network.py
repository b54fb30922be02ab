"""The network of a node: its interfaces, and which of them lead to other nodes and to storage."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


def find_ipv6():
    # IPv6 addresses that others can reach (scope global, 00), with prefix length, by the name of their interface.
    found = {}
    for line in lines(pathlib.Path("/proc/net/if_inet6")):
        address, _, length, scope, _, name = line.split()
        if scope == "00":
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
            found.setdefault(name, []).append("%s/%d" % (text, int(length, 16)))
    return found


types = {"1": "ether", "32": "infiniband", "772": "loopback", "280": "can"}  # ARPHRD_* of the kernel
marks = {"bridge": "bridge", "bonding": "bond", "tun_flags": "tun"}
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
told, addresses, ipv6 = {"links": [], "routes": []}, find_addresses(), find_ipv6()
for number, name in socket.if_nameindex():
    folder = pathlib.Path("/sys/class/net", name)
    ask = lambda request: fcntl.ioctl(asking, request, name.encode().ljust(40, b"\0"))[16:]
    kinds = [kind for file, kind in marks.items() if (folder / file).exists()]
    kinds += [line[8:] for line in lines(folder / "uevent") if line.startswith("DEVTYPE=")]
    link = {"name": name, "kind": [*kinds, types.get(tell(folder / "type"), "tunnel")][0]}
    link["mtu"] = int(tell(folder / "mtu") or 0) or None
    link["is_up"] = int.from_bytes(ask(0x8913)[:2], "little") & 65 == 65  # SIOCGIFFLAGS: IFF_UP, IFF_RUNNING
    link["master"] = (folder / "master").resolve().name if (folder / "master").exists() else None
    link["addresses"], link["ipv6_addresses"] = addresses.get(number, []), ipv6.get(name, [])
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
    here. master: the bridge or bond that it is a part of. is_up: switched on, and the link is there. ipv6_addresses:
    those of global scope, which ranks do not use; for messages.

    Raises ValueError for a name or address that is none.
    """

    name: str
    is_up: bool
    mtu: int | None = None
    kind: str = "ether"
    addresses: tuple[str, ...] = ()
    is_default_route: bool = False
    master: str | None = None
    ipv6_addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (self.name, self.master or "-"):
            if not re.fullmatch(r"[^\s/]{1,15}", name):
                raise ValueError(f"{name!r} is no name of an interface")
        for address in self.addresses:
            ipaddress.IPv4Interface(address)
        for address in self.ipv6_addresses:
            ipaddress.IPv6Interface(address)

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
        links = [
            {"ipv6_addresses": [], **row, "is_default_route": row["name"] in default} for row in listed(told["links"])
        ]
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
    ipv6 = [unfit(interface) for interface in interfaces if interface.is_up and interface.ipv6_addresses]
    why = "".join(f"; {text}" for text in ipv6 if "IPv6" in text)
    text = f"none of {_names(interfaces)} has a link and an IPv4 address that others can reach{why}"
    return InterfaceChoice(None, text)


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
    if interface.address is None and interface.ipv6_addresses:
        return f"{name} has IPv6 addresses alone ({interface.ipv6_addresses[0]}), but ranks meet over IPv4: give it one"
    if not interface.addresses:
        return f"{name} has no IPv4 address"
    if interface.address is None:
        return f"{name} has no IPv4 address but {interface.addresses[0]}, which it gave itself"
    return ""


def _names(interfaces: Sequence[NetInterface]) -> str:
    shown = ", ".join(interface.name for interface in interfaces[:12])
    return f"{shown}, ..." if len(interfaces) > 12 else shown or "nothing"


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
