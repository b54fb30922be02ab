"""Which IPv4 networks this machine uses already."""

from __future__ import annotations

import ipaddress
from pathlib import Path


def used_networks() -> list[ipaddress.IPv4Network]:
    """Destinations of this machine's routes, without the default route: it leads everywhere."""
    try:
        return parse_routes(Path("/proc/net/route").read_text(encoding="ascii"))
    except OSError:
        return []


def parse_routes(table: str) -> list[ipaddress.IPv4Network]:
    """The networks in a text like /proc/net/route: hexadecimal, in the byte order of x86."""
    networks = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and int(fields[7], 16):
            address, mask = (int.from_bytes(int(word, 16).to_bytes(4, "little")) for word in (fields[1], fields[7]))
            networks.append(ipaddress.IPv4Network((address & mask, mask.bit_count())))
    return networks
