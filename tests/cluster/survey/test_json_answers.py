"""Answers that nodes tell in JSON: whatever shape it has, it is read or refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.survey.adapters import parse_adapters, parse_gpudirect
from cluster.survey.interfaces import read_network
from cluster.survey.kernel_log import read_kernel_log
from cluster.survey.nvidia_smi import read_pci_devices
from cluster.survey.section import Section, SectionState, UnreadableError

KEYS = st.sampled_from(
    [
        *("peers", "module", "driver", "dmabuf", "devices", "total", "ports", "broken", "dev", "port", "path", "state"),
        *("rate", "gids", "grown", "links", "routes", "name", "up", "mtu", "master", "addresses", "reader", "seen"),
    ]
)
WORDS = st.sampled_from(["port", "broken", "mlx5_0", "1", "eth0", "0000:01:00.0", "0x030200"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS | st.text(max_size=2), inner, max_size=5),
    max_leaves=12,
)


def told(name: str, value: Any) -> Section:
    return Section(name, json.dumps(value), 0, SectionState.ENDED)


LINK = {"ifname": "eth0", "flags": ["UP", "LOWER_UP"], "mtu": 1500, "link_type": "ether", "addr_info": []}


PARSERS = {
    "adapters": lambda value: parse_adapters(told("ib.ports", value)),
    "ports": lambda value: parse_adapters(told("ib.ports", {"ports": value, "broken": {}})),
    "gpudirect": lambda value: parse_gpudirect(told("ib.gpudirect", value)),
    "devices": lambda value: read_pci_devices(told("gpu.lspci", value)),
    "log": lambda value: read_kernel_log(told("kernel.log", value)),
    "links": lambda value: read_network(told("net.links", {"links": value, "routes": []})),
    "routes": lambda value: read_network(told("net.links", {"links": [LINK], "routes": value})),
}


@pytest.mark.parametrize("name", PARSERS)
@given(value=VALUES)
def test_an_answer_of_any_shape_is_read_or_refused(name: str, value: Any) -> None:
    with contextlib.suppress(UnreadableError):
        PARSERS[name](value)


@pytest.mark.parametrize("name", ["ports", "links", "routes"])
@pytest.mark.parametrize("value", [{}, "", None])
def test_what_is_no_list_is_not_an_empty_one(name: str, value: Any) -> None:
    with pytest.raises(UnreadableError):
        PARSERS[name](value)


@pytest.mark.parametrize(
    "value",
    [
        {"peers": 5, "module": 1, "driver": [], "kernel": 0, "dmabuf": "?"},
        {"devices": 5, "total": None},
        [{"dev": "mlx5_0", "port": []}],
        [[[], {}]],
    ],
)
def test_known_keys_with_values_of_other_kinds_are_refused(value: Any) -> None:
    for parse in PARSERS.values():
        with contextlib.suppress(UnreadableError):
            assert not parse(value)
