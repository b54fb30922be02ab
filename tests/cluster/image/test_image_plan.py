"""Plans of pushes and more, from what nodes answered: nothing here connects."""

from __future__ import annotations

import pytest

from cluster.errors import ClusterError
from cluster.image.node.identity import image_identity
from cluster.image.plan import NodePlan, Route, choose_feeders, choose_packing
from cluster.image.rate import parse_rate
from cluster.image.status import NodeImage, build_status, read_inspected
from engine.config.errors import ConfigError

MIB = 1 << 20
IDENTITY = "1d" * 32
EMPTY = {name: NodePlan(name, Route.DIRECT) for name in "abcdef"}


def routes(*nodes: NodePlan, route: str = "auto") -> list[tuple[str, str, str]]:
    return [(node.node, node.route.value, "".join(node.feeders)) for node in choose_feeders(nodes, route)]


@pytest.mark.parametrize(
    ("names", "route", "expected"),
    [
        ("a", "auto", ["direct"]),
        ("ab", "auto", ["direct", "direct"]),
        ("abcdef", "auto", ["direct", "chain a", "chain ba", "chain cba", "chain dcb", "chain edc"]),
        ("ab", "chain", ["direct", "chain a"]),
        ("abc", "direct", ["direct", "direct", "direct"]),
    ],
)
def test_two_nodes_are_fed_from_here_and_three_feed_each_other(names, route, expected):
    found = routes(*(EMPTY[name] for name in names), route=route)

    assert [f"{way} {feeders}".strip() for _, way, feeders in found] == expected
    assert [name for name, _, _ in found] == list(names)


def test_nodes_that_have_the_image_or_cannot_get_it_are_no_part_of_the_chain():
    has, dead = NodePlan("a", Route.NONE), NodePlan("c", Route.REFUSED, problem="dead")

    assert routes(has, dead, EMPTY["d"], EMPTY["e"], EMPTY["f"]) == [
        ("a", "none", ""),
        ("c", "refused", ""),
        ("d", "direct", ""),
        ("e", "chain", "d"),
        ("f", "chain", "ed"),
    ]


DOCKER = (
    "Client: Version: 28.2.2 API version: 1.50 Server: Engine: Version: {} API version: 1.41 containerd: Version: 1.7.0"
)
PODMAN = "Client: Podman Engine Version: 4.9.3 API Version: 4.9.3"


@pytest.mark.parametrize(
    ("engines", "packing"),
    [
        ([DOCKER.format("23.0.1")], "zstd"),
        ([DOCKER.format("28.2.2"), DOCKER.format("20.10.24+dfsg1")], "none"),
        ([DOCKER.format("28.2.2"), PODMAN], "zstd"),
        (["Client: Version: 28.2.2"], "none"),
    ],
)
def test_layers_are_packed_as_every_engine_takes_them(engines, packing):
    nodes = [NodePlan(f"n{k}", Route.DIRECT, engine=engine) for k, engine in enumerate(engines)]

    assert choose_packing(nodes) == packing


@pytest.mark.parametrize(
    ("code", "out", "said", "words"),
    [
        (1, b"", b"Cannot connect to the Docker daemon", "Cannot connect"),
        (137, b"", b"", "ended with 137"),
        (0, b"[]", b"", "makes no sense"),
        (0, b'[{"Id": 1, "RootFS": 7}]', b"", "makes no sense"),
        (0, b"[" * 100_000, b"", "makes no sense"),
    ],
)
def test_an_engine_that_does_not_answer_is_no_engine_without_the_image(code, out, said, words):
    for none in (b"Error: No such image: app:1", b"Error: inspecting object: app:1: image not known"):
        assert read_inspected(1, b"", none) is None
    with pytest.raises(ClusterError, match=words):
        read_inspected(code, out, said)


@pytest.mark.parametrize(
    ("text", "rate"), [("50MB/s", 50e6), ("50MiB/s", 50 * MIB), ("400mbit", 50e6), ("1.5 GB/s", 1.5e9), ("9B", 9.0)]
)
def test_rates_are_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0MB/s", "-1MB/s", "5", "5MB/h"])
def test_rates_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="50MB/s"):
        parse_rate(text)


INSPECTED = {
    "Architecture": "amd64",
    "Os": "linux",
    "Created": "2026-01-01T00:00:00Z",
    "RootFS": {"Type": "layers", "Layers": ["sha256:1", "sha256:2"]},
    "Config": {"Env": ["A=1"], "Cmd": ["x"], "Labels": {"a": "b"}},
}


def test_the_identity_does_not_depend_on_the_kind_of_engine():
    other = {
        **INSPECTED,
        "Id": "sha256:other",
        "RepoTags": ["a:1"],
        "Config": {**INSPECTED["Config"], "Hostname": "x", "Image": "sha256:parent", "User": "", "Volumes": None},
    }
    assert image_identity(other) == image_identity(INSPECTED)


@pytest.mark.parametrize(
    "changes",
    [
        {"Architecture": "arm64"},
        {"Os": "windows"},
        {"Created": "2026-01-02T00:00:00Z"},
        {"RootFS": {"Layers": ["sha256:2", "sha256:1"]}},
        {"Config": {"Env": ["A=2"], "Cmd": ["x"], "Labels": {"a": "b"}}},
    ],
)
def test_whatever_a_container_could_notice_changes_the_identity(changes):
    assert image_identity({**INSPECTED, **changes}) != image_identity(INSPECTED)


def test_status_compares_with_this_machine_and_else_with_most_nodes():
    found = [NodeImage("a", "x"), NodeImage("b", "y"), NodeImage("c", "y")]
    here, most = build_status("app", found, "x"), build_status("app", found, None)

    assert [(group.nodes, group.differs) for group in here.groups] == [(("b", "c"), True), (("a",), False)]
    assert [(group.nodes, group.differs) for group in most.groups] == [(("b", "c"), False), (("a",), True)]


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([NodeImage("a", "x")], 0),
        ([NodeImage("a", "x"), NodeImage("b")], 1),
        ([NodeImage("a", "x"), NodeImage("b", "y")], 1),
        ([NodeImage("a", "x"), NodeImage("b", problem="dead")], 3),
        ([NodeImage("a"), NodeImage("b", problem="dead")], 1),
    ],
)
def test_status_says_by_its_exit_code_whether_all_nodes_hold_the_image(found, code):
    assert build_status("app", found, "x").exit_code == code
