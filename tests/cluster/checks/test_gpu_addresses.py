"""Where GPUs and NVSwitches sit, by sysfs and by nvidia-smi."""

from __future__ import annotations

import json

import pytest
from rehearsal import healthy
from testkit.check_fakes import changed_section, ended

from cluster.survey.facts import NodeFacts
from cluster.survey.nvidia_smi import GpuAddress, read_pci_devices
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig


def parse_gpu_addresses(probe: NodeProbe) -> tuple[GpuAddress, ...]:
    return NodeFacts(probe, ClusterConfig()).gpu_addresses


def test_the_audio_function_of_a_gpu_is_no_gpu() -> None:
    row = ["0000:01:00.1", "0x040300", "", "/sys/devices/pci0000:00/0000:01:00.1"]
    devices = read_pci_devices(ended("gpu.lspci", json.dumps({"total": 5, "devices": [row]})))
    assert devices is not None
    assert devices.gpus == ()
    assert len(devices.devices) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"total": "x", "devices": []}', '{"total": 5, "devices": [["0000:01:00.0", "zz", "", "/"]]}', "7"],
)
def test_a_list_of_devices_that_breaks_off_is_none(text: str) -> None:
    assert read_pci_devices(ended("gpu.lspci", text)) is None


def test_gpu_addresses_come_from_sysfs_while_nvidia_smi_is_silent() -> None:
    probe = changed_section(healthy(), "gpu.smi", exit_code=15)
    assert parse_gpu_addresses(probe) == parse_gpu_addresses(healthy())


def test_gpu_addresses_come_from_nvidia_smi_while_sysfs_is_silent() -> None:
    addresses = parse_gpu_addresses(changed_section(healthy(), "gpu.lspci", exit_code=1))
    assert addresses[0].pci_path == ("0000:1b:00.0",)
    assert len(addresses) == 8
