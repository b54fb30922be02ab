"""The table of peaks, the measured peak of a CPU, and the warning above it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config.settings import TrainConfig
from engine.planning.time.devices import published_peak
from engine.planning.time.machine import Peak
from engine.training.peak import above_peak_warning, find_peak, machine_cpu_peak, measure_cpu_peak

# Names as torch.cuda gives them, each beside one that is nearly alike; dense bf16 TFLOP/s of the datasheets.
NAMES = {
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H20-3e": 148.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GB200": 2500.0,
    "NVIDIA L40S": 362.1,
    "NVIDIA L4": 121.0,
    "AMD Instinct MI300X": 1307.4,
}


@pytest.mark.parametrize("name", NAMES)
def test_known_devices_have_their_dense_peak_and_its_source(name: str) -> None:
    peak = published_peak(name, "bfloat16")
    assert peak is not None
    assert peak.flops_per_s == pytest.approx(NAMES[name] * 1e12)
    assert "bfloat16 dense" in peak.source


def test_float32_is_slower_and_labelled() -> None:
    peak = published_peak("NVIDIA H200", "float32")
    assert peak == Peak(67e12, "H200 SXM datasheet, float32 dense")


@pytest.mark.parametrize("name", ["Some Accelerator 9", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
def test_unknown_devices_and_slices_have_none(name: str) -> None:
    assert published_peak(name, "bfloat16") is None


def test_measured_peak_is_reached_by_a_matmul_and_labelled() -> None:
    peak = measure_cpu_peak("float32")
    assert peak.flops_per_s is not None
    assert 1e9 < peak.flops_per_s < 1e15
    assert peak.source.startswith("measured: ")


def test_bfloat16_on_a_cpu_is_at_least_as_fast_as_widened_to_float32() -> None:
    wide, narrow = (measure_cpu_peak(dtype).flops_per_s for dtype in ("float32", "bfloat16"))
    assert wide is not None
    assert narrow is not None
    assert narrow > wide / 10  # whatever else runs meanwhile; without bfloat16 units torch is 30 times slower


def test_config_comes_before_measuring() -> None:
    peak = find_peak(TrainConfig(peak_flops_per_device=5e12), torch.device("cpu"))
    assert peak == Peak(5e12, "config: train.peak_flops_per_device")


def test_a_cpu_is_measured_once_and_its_peak_kept_with_the_conditions(tmp_path: Path) -> None:
    first = machine_cpu_peak("float32", tmp_path / "peaks")
    assert first.source.startswith("measured: best float32 matmul of ")
    assert f"{torch.get_num_threads()} threads" in first.source
    (kept,) = (tmp_path / "peaks").iterdir()
    kept.write_text(kept.read_text().replace(str(first.flops_per_s), "1234.5"))
    assert machine_cpu_peak("float32", tmp_path / "peaks") == Peak(1234.5, first.source)
    kept.write_text('{"flops_per_s": 1')  # cut off
    assert machine_cpu_peak("float32", tmp_path / "peaks").flops_per_s not in (None, 1234.5)


def test_other_conditions_have_a_peak_of_their_own(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert f"{count} threads" in machine_cpu_peak("float32", tmp_path).source
    finally:
        torch.set_num_threads(threads)
    assert len(list(tmp_path.iterdir())) == 2


def test_only_a_figure_above_the_peak_is_warned_of() -> None:
    peak = Peak(100e12, "a datasheet")
    assert above_peak_warning("step 3", 100e12, peak) is None
    assert above_peak_warning("step 3", 1e20, Peak(None, "unknown")) is None
    warning = above_peak_warning("step 3", 101e12, peak)
    assert warning is not None
    assert "step 3 is 101 TFLOP/s" in warning
    assert "a datasheet" in warning
