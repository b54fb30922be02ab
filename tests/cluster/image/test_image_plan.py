"""Plans of pushes, from what nodes answered: nothing here connects."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.image.archive import SavedImage
from cluster.image.inventory import FreeSpace, NodeSurvey, parse_survey
from cluster.image.node.identity import image_identity
from cluster.image.plan import PushOptions, Route, build_image_plan
from cluster.image.rate import parse_rate
from cluster.image.routes import Feed, Link, Routes
from cluster.image.status import NodeImage, build_status
from cluster.image.store import Layer, Packing, StoredImage
from engine.errors import ConfigError

MIB = 1 << 20
IDENTITY = "1d" * 32


def stored(*mib: int) -> StoredImage:
    """An image with layers that pack to so many MiB, half of what they are."""
    layers = tuple(
        Layer(
            f"sha256:{k:064x}",
            2 * size * MIB,
            {"zstd": Packing(f"{k:02x}" * 32, size * MIB), "gzip": Packing(f"{k + 100:02x}" * 32, size * MIB + 7)},
        )
        for k, size in enumerate(mib, start=1)
    )
    return StoredImage("app:1", IDENTITY, SavedImage(b"{}", tuple(layer.diff_id for layer in layers)), layers)


def survey(node: str, **changes) -> NodeSurvey:
    """A node that has nothing and can do everything."""
    usual = NodeSurvey(node, unzstd=True, has_ssh=True, has_keys_file=True, blobs={}, parts={})
    return replace(usual, **changes)


def plan_for(image: StoredImage, *surveys: NodeSurvey, **options):
    return build_image_plan(image, surveys, PushOptions(**options))


def routes(plan) -> dict[str, tuple[str, str | None]]:
    return {node.node: (node.route.value, node.feeder) for node in plan.nodes}


def test_two_nodes_are_sent_to_directly_and_three_in_a_chain():
    image = stored(1)
    assert routes(plan_for(image, survey("a"), survey("b"))) == {"a": ("direct", None), "b": ("direct", None)}
    assert routes(plan_for(image, survey("a"), survey("b"), survey("c"))) == {
        "a": ("direct", None),
        "b": ("chain", "a"),
        "c": ("chain", "b"),
    }


def test_a_route_that_was_asked_for_is_taken():
    image = stored(1)
    assert routes(plan_for(image, survey("a"), survey("b"), route="chain"))["b"] == ("chain", "a")
    nodes = [survey(name) for name in "abcd"]
    assert {route for route, _ in routes(plan_for(image, *nodes, route="direct")).values()} == {"direct"}


def test_a_node_that_has_the_image_gets_nothing_and_is_in_no_chain():
    plan = plan_for(stored(3), survey("a", identity=IDENTITY), survey("b"), survey("c"), survey("d"))

    assert plan.node("a").route is Route.NONE
    assert plan.node("a").up_to_date
    assert plan.node("a").skipped_bytes == 3 * MIB
    assert plan.chains == (("b", "c", "d"),)


def test_an_image_that_is_there_under_another_name_is_only_named():
    node = plan_for(stored(3), survey("a", same="sha256:5")).node("a")

    assert (node.same, node.need, node.move_bytes) == ("sha256:5", (), 0)


def test_only_layers_above_the_common_beginning_are_needed():
    node = plan_for(stored(1, 2, 3), survey("a", present=2)).node("a")

    assert (node.need, node.move_bytes, node.skipped_bytes) == ((2,), 3 * MIB, 3 * MIB)


def test_an_engine_that_takes_no_partial_archives_needs_all_layers():
    assert plan_for(stored(1, 2, 3), survey("a", present=2, takes_partial=False)).node("a").need == (0, 1, 2)


def test_a_layer_that_repeats_is_sent_once():
    image = stored(1, 2)
    image = replace(image, saved=SavedImage(b"{}", (*image.saved.diff_ids, image.layers[0].diff_id)))

    assert plan_for(image, survey("a")).node("a").need == (0, 1)


def test_what_earlier_pushes_left_is_not_sent_again():
    image = stored(4, 6)
    whole, part = image.layers[0].packings["zstd"].sha256, image.layers[1].packings["zstd"].sha256
    node = plan_for(image, survey("a", blobs={whole: 4 * MIB}, parts={part: MIB})).node("a")

    assert (node.move_bytes, node.resumed_bytes) == (5 * MIB, 5 * MIB)


def test_a_cached_layer_of_another_size_counts_for_nothing():
    image = stored(4)
    cached = {image.layers[0].packings["zstd"].sha256: 3 * MIB}

    assert plan_for(image, survey("a", blobs=cached)).node("a").move_bytes == 4 * MIB


def test_nodes_of_a_chain_fetch_what_those_behind_them_need():
    plan = plan_for(stored(1, 2, 3), survey("a", present=2), survey("b"), survey("c", present=1))

    assert plan.chains == (("b", "c", "a"),)  # who needs most comes first, so nobody carries for others
    assert [plan.node(name).fetch for name in "bca"] == [(0, 1, 2), (1, 2), (2,)]


def test_a_node_without_zstd_gets_gzip_in_a_chain_of_its_own():
    plan = plan_for(stored(1), survey("a"), survey("b", unzstd=False), survey("c"), survey("d"))

    assert plan.node("b").encoding == "gzip"
    assert plan.node("b").move_bytes == MIB + 7
    assert sorted(plan.chains) == [("a", "c", "d"), ("b",)]


def test_nodes_without_ssh_or_keys_stand_where_they_need_none():
    nodes = [survey("a", has_ssh=False), survey("b", has_keys_file=False), survey("c"), survey("d")]

    assert plan_for(stored(1), *nodes).chains == (("b", "c", "d", "a"),)


def test_a_second_node_without_ssh_is_fed_from_here_and_says_why():
    nodes = [survey("a", has_ssh=False), survey("b", has_ssh=False), survey("c"), survey("d")]
    plan = plan_for(stored(1), *nodes)

    assert ("b",) in plan.chains
    assert "has no ssh" in plan.node("b").note


def test_a_full_disk_is_refused_before_sending_and_the_chain_closes_around_it():
    full = survey("b", engine_folder="/var/lib/docker", engine_free=FreeSpace(30 * MIB, 1))
    plan = plan_for(stored(10), survey("a"), full, survey("c"))

    assert plan.node("b").route is Route.REFUSED
    assert "needs 40 MiB where /var/lib/docker lies, 30 MiB are free" in plan.node("b").problem
    assert plan.chains == (("a", "c"),)
    assert plan.node("c").feeder == "a"


@pytest.mark.parametrize(("free_mib", "fits"), [(66, False), (67, True)])
def test_cache_and_engine_on_one_disk_need_packed_and_twice_unpacked_together(free_mib, fits):
    free = FreeSpace(free_mib * MIB - 1 + fits, 1)
    node = plan_for(stored(10), survey("a", cache_free=free, engine_free=free)).node("a")

    assert (node.route is not Route.REFUSED) is (free_mib >= 67)


def test_a_node_with_a_problem_is_refused_and_the_others_go_on():
    plan = plan_for(stored(1), survey("a", problem="dead"), survey("b"))

    assert plan.node("a").problem == "dead"
    assert plan.chains == (("b",),)


def test_with_a_shared_folder_one_node_writes_and_the_others_send_nothing():
    plan = plan_for(stored(5), survey("a"), survey("b"), shared_folder="/shared")

    assert routes(plan) == {"a": ("shared", None), "b": ("shared", "a")}
    assert plan.move_bytes == 5 * MIB


@pytest.mark.parametrize(
    "options",
    [{"route": "shared"}, {"route": "chain", "shared_folder": "/x"}, {"shared_folder": "relative"}],
)
def test_routes_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        PushOptions(**options)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_every_feeder_has_what_the_nodes_behind_it_fetch(nodes):
    surveys = [
        survey(f"n{k}", present=present, has_ssh=ssh, has_keys_file=keys, unzstd=zstd)
        for k, (present, ssh, keys, zstd) in enumerate(nodes)
    ]
    plan = plan_for(stored(1, 2, 3), *surveys)

    assert sorted(name for chain in plan.chains for name in chain) == [n.node for n in plan.nodes if n.need]
    for node in plan.nodes:
        if node.feeder is not None:
            feeder = plan.node(node.feeder)
            assert set(node.fetch) <= set(feeder.fetch)
            assert feeder.encoding == node.encoding


def test_a_lost_node_is_bridged_and_a_lost_head_is_replaced_by_the_launcher():
    chain = Routes([["a", "b", "c", "d"]])
    assert chain.lost("b", waiting=["a", "c", "d"]) == [Link("a", "c")]
    assert chain.lost("a", waiting=["c", "d"]) == [Feed("c")]
    assert chain.lost("c", waiting=["d"]) == [Feed("d")]
    assert chain.lost("d", waiting=[]) == []


def test_a_node_behind_a_lost_one_that_has_everything_is_left_alone():
    assert Routes([["a", "b", "c"]]).lost("b", waiting=["a"]) == []


def test_a_lost_writer_of_a_shared_folder_has_one_heir():
    star = Routes([["a", "b", "c"]], star=True)

    assert star.listeners() == []
    assert star.lost("a", waiting=["b", "c"]) == [Feed("b")]
    assert star.feeder == {"b": None, "c": "b"}


@pytest.mark.parametrize(
    ("text", "rate"), [("50MB/s", 50e6), ("50MiB/s", 50 * MIB), ("400mbit", 50e6), ("1.5 GB/s", 1.5e9), ("9B", 9.0)]
)
def test_rates_are_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0MB/s", "-1MB/s", "5", "5MB/h"])
def test_rates_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="50MB/s"):
        parse_rate(text)


GOOD = {
    "engine": {"version": "20.10", "root": "/var/lib/docker", "partial": True},
    "have": {"identity": None, "same": None, "present": 1},
    "blobs": {"ab": 3, "cd.part": 4},
    "cache": "/c",
    "unzstd": "zstd",
    "ssh": True,
    "keys_file": True,
}


def test_the_answer_of_a_node_becomes_a_survey():
    found = parse_survey("a", GOOD)

    assert (found.present, found.blobs, found.parts, found.unzstd) == (1, {"ab": 3}, {"cd": 4}, True)


@pytest.mark.parametrize("changes", [{"engine": []}, {"have": None}, {"blobs": {"a": "b"}}, {"cache_free": 3}])
def test_an_answer_that_makes_no_sense_is_a_problem_of_that_node(changes):
    assert parse_survey("a", {**GOOD, **changes}).problem


def test_escape_sequences_of_an_engine_do_not_reach_the_screen():
    assert "\x1b" not in parse_survey("a", {"engine_error": "\x1b[2Jgone"}).problem


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
