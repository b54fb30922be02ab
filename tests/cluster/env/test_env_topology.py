"""The matrix of `nvidia-smi topo -m` in its formats, and that half a matrix is refused."""

from __future__ import annotations

import pytest
from env_topologies import MACHINES, topology_text

from cluster.parse.topology import Nearness, TopologyError, parse_topology

H100 = topology_text("h100_12nics")
PAIR = "\tGPU0\tmlx5_0\tCPU Affinity\nGPU0\t X \tPIX\t0-7\nmlx5_0\tPIX\t X \t\n"


def test_new_format_names_adapters_by_its_legend() -> None:
    topology = parse_topology(H100)
    assert topology.gpus == tuple(range(8))
    assert topology.adapters == tuple(f"mlx5_{index}" for index in range(12))
    assert topology.between(5, "mlx5_9") is Nearness.PXB
    assert topology.between(5, "mlx5_0") is Nearness.SYS
    assert topology.numa == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 1}


def test_old_format_names_adapters_in_the_header() -> None:
    topology = parse_topology(topology_text("a100_4nics"))
    assert topology.adapters == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert topology.between(3, "mlx5_2") is Nearness.PXB
    assert {topology.between(gpu, adapter) for gpu in range(4, 8) for adapter in topology.adapters} == {Nearness.SYS}


def test_underlined_headers_are_read() -> None:
    assert "\x1b[4m" in topology_text("h20_8nics")
    assert parse_topology(topology_text("h20_8nics")).between(0, "mlx5_1") is Nearness.PIX


def test_a_legend_may_name_bonds() -> None:
    assert parse_topology(topology_text("roce_8nics")).adapters[0] == "mlx5_bond_0"


def test_gpus_alone_make_a_matrix() -> None:
    topology = parse_topology(topology_text("single_gpu"))
    assert (topology.gpus, topology.adapters, topology.nearness) == ((0,), (), {})


def test_windows_line_ends_and_words_before_the_matrix_are_no_harm() -> None:
    noisy = "Warning: persistence mode is disabled\n" + H100
    assert parse_topology(noisy.replace("\n", "\r\n")) == parse_topology(H100)


def test_what_is_not_shown_is_not_known() -> None:
    assert parse_topology(H100).between(0, "mlx5_99") is None
    assert parse_topology(PAIR.replace("PIX", "N/A")).between(0, "mlx5_0") is None


@pytest.mark.parametrize("name", MACHINES)
def test_a_matrix_cut_off_anywhere_is_refused(name: str) -> None:
    lines = topology_text(name).splitlines()
    last_row = max(number for number, line in enumerate(lines) if line.startswith(("GPU", "NIC0", "NIC1", "mlx5_")))
    for end in range(last_row):
        with pytest.raises(TopologyError):
            parse_topology("\n".join([*lines[:end], lines[end][: len(lines[end]) // 2]]))


def test_a_missing_legend_is_refused() -> None:
    with pytest.raises(TopologyError, match="does not name NIC0"):
        parse_topology(H100[: H100.index("NIC Legend")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with 'nothing'"),
        ("No devices were found\n", "No devices were found"),
        ("\tGPU0\tfan speed\n", "does not name devices"),
        ("\tGPU0\tGPU0\n", "repeats a device"),
        (PAIR.replace("mlx5_0\tPIX", "mlx5_0\tSYS"), "in one row"),
        (PAIR.replace("PIX", "ERR!"), "ERR!"),
        (PAIR.replace(" X ", "PIX"), "damaged"),
        (PAIR.replace("GPU0\t X \tPIX\t0-7", "GPU0\t X "), "cut off or damaged"),
        (PAIR.replace("mlx5_0\tPIX\t X \t\n", ""), "row mlx5_0 is missing"),
    ],
)
def test_what_is_no_matrix_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(TopologyError, match=r"nvidia-smi topo -m: .*" + words.replace("!", r"\!")):
        parse_topology(text)


def test_words_of_a_stranger_come_out_harmless() -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology("\x1b]0;evil\x07" + "A" * 10_000)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 300
