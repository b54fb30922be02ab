"""The files of fake hardware: in what nodes differ, and faults that make no sense."""

from __future__ import annotations

import pytest

from cluster.testbed.hardware.devices import build_hardware
from cluster.testbed.hardware.files import hardware_files
from engine.config.errors import ConfigError


def test_nodes_differ_in_uuids_and_in_nothing_else() -> None:
    first, again, other = (hardware_files("h100x8", node, 1) for node in ("n1", "n1", "n2"))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"bin/nvidia-smi"}
    assert hardware_files("none", "n1", 1) == {}
    for profile, rails, spares in (("h100x8", 8, 5), ("a100x8", 4, 0)):
        hardware = build_hardware(profile, 1, ["roce"])
        assert len(hardware.adapters) == rails + spares
        compute = [(one["netdev"], one["link_layer"], one["numa_node"]) for one in hardware.adapters[:rails]]
        assert compute == [(f"rdma{rail}", "Ethernet", int(rail >= rails / 2)) for rail in range(rails)]
        assert [gpu["numa_node"] for gpu in hardware.gpus] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("profile", "fault", "words"),
    [
        ("h100x8", "ecc:8", "8 GPUs"),
        ("h100x8", "ecc", "GPU N"),
        ("h100x8", "ecc:-1", "GPU N"),
        ("h100x8", "sxid:1", "NVSwitch"),
        ("h100x8", "driver:", "VERSION"),
        ("h100x8", "driver:$(reboot)", "VERSION"),
        ("h100x8", "xid:a", "CODE"),
        ("h100x8", "xid:79:8", "CODE"),
        ("h100x8", "melted:1", "gpu_lost"),
        ("h100x8", "port_down:mlx5_99", "there are mlx5_0"),
        ("h100x8", "port_down:rail8", "there are mlx5_0"),
        ("h100x8", "port_down", "there are mlx5_0"),
        ("h100x8", "roce:1", "RoCE"),
        ("none", "ecc:1", "no fake hardware"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(profile: str, fault: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hardware_files(profile, "n1", 1, (fault,))
