from __future__ import annotations

import pytest

from burst_cli.figures import binary_bytes, clean, count, duration, flops_per_s, percent, plain, seconds, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (7, "7"),
        (950, "950"),
        (999.6, "1K"),
        (12_345, "12.3K"),
        (4.56e6, "4.56M"),
        (2e18, "2000P"),
    ],
)
def test_count(value: float | None, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1.5 * 2**30, "1.5 GiB")]
)
def test_binary_bytes(value: float | None, text: str) -> None:
    assert binary_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.0004, "0.4 ms"), (0.25, "250 ms"), (0.9999, "1 s"), (1.25, "1.25 s")]
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.4, "0:00"), (42, "0:42"), (59.7, "1:00"), (725, "12:05"), (11_045, "3:04:05")]
)
def test_duration(value: float | None, text: str) -> None:
    assert duration(value) == text


def test_flops_per_s() -> None:
    assert (flops_per_s(61.44e9), flops_per_s(989e12), flops_per_s(None)) == ("61.4 GFLOP/s", "989 TFLOP/s", "–")


def test_ratios_and_numbers() -> None:
    assert (percent(0.4567), percent(None), plain(2.5), plain(None)) == ("45.7%", "–", "2.5000", "–")


def test_sparkline_spans_low_to_high_within_its_width() -> None:
    assert sparkline([4.0, 3.0, 2.0], 10) == "█▅▁"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert len(sparkline(list(range(1000)), 24)) == 24


@pytest.mark.parametrize(
    ("dirty", "text"),
    [
        ("a\x1b[31;1mb\x1b[0mc", "abc"),
        ("\x1b]0;title\x07x", "x"),
        ("a\tb\nc", "a    b\nc"),
        ("bell\x07 back\x08 nul\x00", "bell back nul"),
        ("half \x1b[", "half "),
        ("\x9b31mred", "31mred"),
    ],
)
def test_clean_leaves_no_terminal_control(dirty: str, text: str) -> None:
    assert clean(dirty) == text
