"""The table of peaks, the measured peak of a CPU, and the warning above it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config.settings import TrainConfig
from engine.predict.machine import DEVICES, Peak, find_device, find_machine, published_peak
from engine.training.peak import find_peak, machine_cpu_peak, measure_cpu_peak

FLOAT32 = TrainConfig(compute_dtype="float32")


# Names as torch.cuda and people give them, each beside one that is nearly alike; dense bf16 TFLOP/s of the datasheets.
@pytest.mark.parametrize(
    ("name", "device", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", 312.0),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb", 312.0),
        ("a100-40gb", "a100-40gb", 312.0),
        ("NVIDIA A800-SXM4-80GB", "a800", 312.0),
        ("NVIDIA H100 80GB HBM3", "h100", 989.4),
        ("NVIDIA H100 PCIe", "h100-pcie", 756.5),
        ("NVIDIA H100 NVL", "h100-nvl", 835.5),
        ("NVIDIA H800", "h800", 989.4),
        ("NVIDIA H200 NVL", "h200-nvl", 835.5),
        ("NVIDIA H20-3e", "h20", 148.0),
        ("NVIDIA GH200 480GB", "gh200", 989.4),
        ("NVIDIA GB200", "gb200", 2500.0),
        ("NVIDIA B200", "b200", 2250.0),
        ("NVIDIA L40S", "l40s", 362.1),
        ("NVIDIA L4", "l4", 121.0),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 165.2),
        ("AMD Instinct MI300X", "mi300x", 1307.4),
        *((name, None, None) for name in ("Some Accelerator 9", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g", "")),
    ],
)
def test_devices_are_found_by_driver_names(name: str, device: str | None, tflops: float | None) -> None:
    found, peak = find_device(name), published_peak(name, "bfloat16")
    assert (found and found.name) == device
    assert (peak and peak.flops_per_s) == (tflops and pytest.approx(tflops * 1e12))
    assert peak is None or "bfloat16 dense" in peak.source


def test_known_devices_have_possible_figures() -> None:
    assert all(device.is_cpu or min(device.fp32_peak or 0, device.bf16_peak or 0) > 1e12 for device in DEVICES)
    assert all(device.memory_bytes is None or device.memory_bytes > 2**34 for device in DEVICES)


def test_h100_has_the_rates_of_its_datasheet() -> None:
    h100 = find_machine("h100")  # bytes per second; seconds of a message
    rates = [getattr(h100, f"{name}_bytes_per_s") for name in ("elementwise", "update", "intra", "inter", "host")]
    assert rates == [3350e9, 3350e9, 450e9, 50e9, 64e9]
    assert [h100.intra_latency_s, h100.inter_latency_s, h100.host_latency_s] == [8e-6, 15e-6, 10e-6]


def test_published_peak_is_of_a_dtype() -> None:
    assert published_peak("NVIDIA H200", "float32") == Peak(67e12, "H200 SXM datasheet, float32 dense")


def test_configured_peak_is_preferred() -> None:
    found = find_peak(TrainConfig(peak_flops_per_device=5e12), torch.device("cpu"))
    assert found == Peak(5e12, "config: train.peak_flops_per_device")


def test_bfloat16_on_a_cpu_is_at_least_as_fast_as_widened_to_float32() -> None:
    wide, narrow = (measure_cpu_peak(dtype).flops_per_s for dtype in ("float32", "bfloat16"))
    assert wide is not None
    assert narrow is not None
    assert 1e9 < wide < 1e15
    assert narrow > wide / 10  # whatever else runs meanwhile; without bfloat16 units torch is 30 times slower


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Peak, Path]:
    """The peak of this CPU, and the file of the cache that it is in."""
    monkeypatch.setenv("BURST_CACHE_DIR", str(tmp_path))
    peak = find_peak(FLOAT32, torch.device("cpu"))
    (file,) = (tmp_path / "peaks").iterdir()
    return peak, file


def test_measured_peak_names_its_conditions(measured: tuple[Peak, Path]) -> None:
    assert measured[0].source.startswith("measured: best float32 matmul of ")
    assert f"{torch.get_num_threads()} threads" in measured[0].source


def test_peak_of_a_cpu_is_measured_once(measured: tuple[Peak, Path]) -> None:
    peak, file = measured
    file.write_text(file.read_text().replace(str(peak.flops_per_s), "1234.5"))
    assert find_peak(FLOAT32, torch.device("cpu")) == Peak(1234.5, peak.source)


def test_peak_is_measured_again_where_its_file_is_damaged(measured: tuple[Peak, Path]) -> None:
    measured[1].write_text('{"flops_per_s": 1')  # cut off
    assert (find_peak(FLOAT32, torch.device("cpu")).flops_per_s or 0) > 1e6


def test_other_conditions_have_another_cached_peak(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert f"{count} threads" in machine_cpu_peak("float32", tmp_path).source
    finally:
        torch.set_num_threads(threads)
    assert len(list(tmp_path.iterdir())) == 2
