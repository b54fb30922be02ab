"""Plans of pushes and more, from what nodes answered: nothing here connects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import ClusterError
from cluster.image.engine import Engine, Image, build_status
from cluster.image.plan import NodePlan, choose_feeders, choose_packing
from cluster.ssh.connection import CommandResult
from cluster.ssh.hosts import Host, Outcome

MIB = 1 << 20
IDENTITY = "1d" * 32
EMPTY = {name: NodePlan(name, "direct") for name in "abcdef"}
HAS, DEAD = NodePlan("has", "none"), NodePlan("dead", "refused", problem="dead")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([EMPTY["a"], HAS], ["direct", "none"]),
        ([EMPTY["a"], DEAD, EMPTY["b"], HAS], ["direct", "refused", "direct", "none"]),
        ([EMPTY["a"], DEAD, HAS, EMPTY["b"], EMPTY["c"]], ["direct", "refused", "none", "chain a", "chain ba"]),
        (EMPTY.values(), ["direct", "chain a", "chain ba", "chain cba", "chain dcb", "chain edc"]),
    ],
)
def test_two_nodes_are_fed_from_here_and_three_that_lack_the_image_feed_each_other(nodes, expected):
    found = choose_feeders(list(nodes))
    assert [f"{node.route} {''.join(node.feeders)}".strip() for node in found] == expected
    assert [node.node for node in found] == [node.node for node in nodes]


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
    nodes = [NodePlan(f"n{k}", "direct", engine=engine) for k, engine in enumerate(engines)]
    assert choose_packing(nodes) == packing


def engine(code: int, out: bytes, said: bytes) -> Engine:
    """One that always answers this."""
    return Engine(lambda words: CommandResult(code, out, said), ("docker",))


@pytest.mark.parametrize(
    ("code", "out", "said", "words"),
    [
        (1, b"", b"Cannot connect to the Docker daemon", "docker image: Cannot connect"),
        (137, b"", b"", "ended with 137"),
        (0, b"[]", b"", "makes no sense"),
        (0, b'[{"Id": 1, "RootFS": 7}]', b"", "makes no sense"),
        (0, b"[" * 100_000, b"", "makes no sense"),
    ],
)
def test_an_engine_that_does_not_answer_is_no_engine_without_the_image(code, out, said, words):
    for none in (b"Error: No such image: app:1", b"Error: inspecting object: app:1: image not known"):
        assert engine(1, b"", none).find("app:1") is None
    with pytest.raises(ClusterError, match=words):
        engine(code, out, said).find("app:1")
    assert engine(0, b"\xff", b"").call("version") == "\ufffd"


INSPECTED = {
    "Id": "sha256:1",
    "Size": 1,
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
        "RootFS": dict(reversed(INSPECTED["RootFS"].items())),
        "Config": {**INSPECTED["Config"], "Hostname": "x", "Image": "sha256:parent", "User": "", "Volumes": None},
    }
    here = Image.of("a", INSPECTED)
    assert here == Image("a", here.identity, "sha256:1", "2026-01-01T00:00:00Z", 2, 1)
    assert Image.of("a", other) == replace(here, image_id="sha256:other")


def test_whatever_a_container_could_notice_changes_the_identity():
    config = "User ExposedPorts Env Entrypoint Cmd Volumes WorkingDir Labels StopSignal Healthcheck OnBuild Shell"
    changes = [
        *({}, {"Architecture": "arm64"}, {"Os": "windows"}, {"Created": "2026-01-02T00:00:00Z"}),
        {"RootFS": {"Layers": ["sha256:2", "sha256:1"]}},
        *({"Config": {**INSPECTED["Config"], field: ["other"]}} for field in f"{config} ArgsEscaped".split()),
    ]
    assert len({Image.of("a", {**INSPECTED, **change}).identity for change in changes}) == len(changes)


def nodes_with(identities: str, dead: str = "") -> list[Outcome[Image | None]]:
    """What nodes a, b, ... hold: an image by a letter, or none; and one that is dead."""
    images = [None if one == " " else Image("app", one, f"sha256:{one}", "today", 1, 1) for one in identities]
    outcomes: list[Outcome[Image | None]] = [
        Outcome(Host(name, name), image, None, 0.0) for name, image in zip("abcd", images, strict=False)
    ]
    return outcomes + [Outcome(Host(name, name), None, ClusterError(f"{name}: dead"), 0.0) for name in dead]


@pytest.mark.parametrize(
    ("found", "local", "reference", "code"),
    [
        (nodes_with("xyy"), "x", ("x", "this machine"), 1),
        (nodes_with("xyy"), None, ("y", "most nodes"), 1),
        (nodes_with("x"), "x", ("x", "this machine"), 0),
        (nodes_with("x "), "x", ("x", "this machine"), 1),
        (nodes_with("x", dead="d"), "x", ("x", "this machine"), 3),
        (nodes_with(" ", dead="d"), None, (None, "nothing"), 1),
    ],
)
def test_status_compares_with_this_machine_and_else_with_most_nodes(found, local, reference, code):
    status = build_status("app", found, local)
    assert ((status.reference, status.source), status.exit_code) == (reference, code)
