"""The files of fake hardware: what they hold, what the fake nvidia-smi answers, and faults that make no sense."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.testbed.hardware.devices import gpu_path
from cluster.testbed.hardware.files import hardware_files, pci_folder
from engine.config.errors import ConfigError


def test_nodes_differ_in_uuids_and_in_nothing_else() -> None:
    first, again, other = (hardware_files("h100x8", node, 1) for node in ("n1", "n1", "n2"))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"bin/nvidia-smi"}
    assert hardware_files("none", "n1", 1) == {}


def test_the_pci_tree_leads_to_each_gpu() -> None:
    files = hardware_files("a100x8", "n1", 1)
    folder = pci_folder(gpu_path("a100x8", 5))
    assert files["root/sys/bus/pci/devices/0000:90:00.0"].link_to == f"../../../{folder.removeprefix('sys/')}"
    assert files[f"root/{folder}/vendor"].text == "0x10de\n"


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


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        (["-L"], "GPU 0: NVIDIA H100 80GB HBM3 (UUID: "),
        (["nvlink", "--status"], "GPU 0: NVIDIA H100 80GB HBM3 (UUID: "),
        (["-q", "-x"], '<?xml version="1.0" ?>'),
        (["--frobnicate"], "Invalid combination of input arguments."),
    ],
)
def test_the_fake_tool_answers_what_burst_asks(tmp_path: Path, arguments: list[str], first_line: str) -> None:
    for name, file in hardware_files("h100x8", "n1", 1).items():
        file.write(tmp_path / name)
    run = subprocess.run([tmp_path / "bin/nvidia-smi", *arguments], capture_output=True, text=True)
    assert run.stdout.startswith(first_line)
    assert (run.returncode == 0) == ("Invalid" not in first_line)
