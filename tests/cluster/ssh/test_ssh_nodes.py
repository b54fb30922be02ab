"""Lists of nodes: NodeSet grammar, hostfiles, Slurm; what is refused, and in which words."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import HostsError
from cluster.ssh.hosts import MAX_NODES, NodeList, is_host_name, parse_nodes, read_hostfile, slurm_nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("bjdx[1-4,7]", ["bjdx1", "bjdx2", "bjdx3", "bjdx4", "bjdx7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a2, a10,a1", ["a1", "a2", "a10"]),
        ("a[1-4]!a[2-3]", ["a1", "a4"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
        ("fe80::[1-2]", ["fe80::1", "fe80::2"]),
        ("n[16000-16001]", ["n16000", "n16001"]),
        (f"n[1-{MAX_NODES}]x[1]", [f"n{number + 1}x1" for number in range(MAX_NODES)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_node_set_grammar_is_understood(text: str, names: list[str]) -> None:
    assert list(parse_nodes(text, "--hosts").names) == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no node is named"),
        ("a&b", "0 nodes"),
        ("@all", "groups"),
        ("root@node1", "cluster.ssh.user"),
        ("node1:2222", "cluster.ssh.port"),
        ("node[1-", "grammar"),
        ("-oProxyCommand=x", "no host name"),
        ("a[1-2] -l root", "no host name"),
        ("a" * 300, "no host name"),
    ],
)
def test_what_names_no_node_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(HostsError, match=words) as caught:
        parse_nodes(text, "cluster.nodes")
    assert str(caught.value).startswith("cluster.nodes: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "node[1-99999999999999999999999999]",
        f"node[1-{'9' * 5000}]",
        "a[1-999]b[1-999]",
        f"n[1-{MAX_NODES}],m[1-2]",
        "a[0-9,10-99999999]",
    ],
)
def test_lists_that_would_fill_memory_are_refused_at_once(text: str) -> None:
    begin = time.thread_time()  # nothing here waits, and what else the machine does is no matter
    with pytest.raises(HostsError, match=str(MAX_NODES)):
        parse_nodes(text, "--hosts")
    assert time.thread_time() - begin < 1.0


@given(st.text(max_size=40))
def test_any_text_gives_host_names_or_a_hosts_error(text: str) -> None:
    try:
        names = parse_nodes(text, "--hosts").names
    except HostsError:
        return
    assert names
    assert all(is_host_name(name) and not name.startswith("-") for name in names)


def test_hostfile_keeps_its_order_and_ignores_slots_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\ufeff# fleet\nb2 slots=8 max_slots=8\n\n  b[1-2] # twice\na1\tslots=4\r\n")
    assert read_hostfile(path) == NodeList(("b2", "b1", "a1"), f"hostfile {path}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a1\na2 a3\n", "line 2"),
        (b"a1 slots=many\n", "slots=many"),
        (b"# nothing\n", "names no node"),
        (b"\xff\xfea1\n", "line 1: .* no host name"),
    ],
)
def test_a_bad_hostfile_is_named_with_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    for place, said in ((path, words), (tmp_path, "with one node per line")):
        with pytest.raises(HostsError, match=said) as caught:
            read_hostfile(place)
        assert str(place) in str(caught.value)


def test_slurm_allocation_is_read_from_the_environment() -> None:
    assert slurm_nodes({}) is None
    found = slurm_nodes({"SLURM_JOB_NODELIST": "bjdx[1-2,5]"})
    assert found == NodeList(("bjdx1", "bjdx2", "bjdx5"), "Slurm (SLURM_JOB_NODELIST)")
