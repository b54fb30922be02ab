"""Which nodes can carry a run: each problem by its words, all of them at once, and what --force takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.check_fakes import Answer, FakeFleet, answer, ended
from testkit.fake_plan import H100, run_config
from whole_node import CLUSTERS, Row, changed, healthy, rows

from cluster.checks.check import Finding, FleetReport, NodeReport, Selection, Verdict
from cluster.checks.launch import (
    NAME,
    Fit,
    NodeProblem,
    UnfitNodesError,
    check_launch,
    judge_report,
    launch_checks,
    launch_group,
    needed_modules,
    read_resources,
)
from cluster.checks.run import EXPLANATIONS as SSH
from cluster.checks.run import CheckOptions
from cluster.checks.selection import EXPLANATIONS, GROUPS
from cluster.errors import SshError, SshFailure
from cluster.launch.ssh import SshNode, read_node
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, UnreadableError
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig
from engine.predict.memory import Gpu
from engine.predict.room import checkpoint_bytes
from engine.pretrained.shape import config_json
from engine.runs.figures import binary_bytes

BARE, DOCKER, NCCL = (run_config(cluster=CLUSTERS[name]) for name in ("bare", "docker", "nccl"))
GLOO = run_config(cluster={"backend": "gloo"})
OFFER: Mapping[str, Any] = {
    "home": "/home/me",
    "user": "me",
    "uid": 1,
    "gid": 2,
    "groups": [4, 20],
    "has_infiniband_devices": True,
    "memory_bytes": 7,
    "room": [100 << 30, ""],
    "port": [23456, ""],
    "locks": {"another": "r7"},
    "data": [{"path": "/a", "files": 12, "bytes": 13, "digest": "d" * 64}],
    "checkpoint_room": [100 << 30, ""],
    "checkpoint_disk": "",
    "has_source": None,
    "model": None,
}


def node(*changes: str, profile: str = "none", gpus: int | None = None, row: Row | None = None) -> Answer:
    """What a node answers: a healthy one of that hardware, with so many GPUs, changed."""
    whole = healthy(row.profile if row else profile)
    probe = NodeProbe("n", {**whole.sections, NAME: ended(NAME, json.dumps(OFFER))})
    probe = row.probe(probe) if row else probe
    if gpus is not None:
        some = "".join(f'<gpu id="00000000:{number:02X}:00.0"/>' for number in range(gpus))
        told = f"<nvidia_smi_log><attached_gpus>{gpus}</attached_gpus>{some}</nvidia_smi_log>"
        changes = ('gpu.lspci/devices=[["0000:01:00.0", "0x030200", "0", "/x"]]', f"gpu.smi!0 {told}", *changes)
    probe = changed(probe, *changes)
    return answer({name: (one.output, one.exit_code or 0) for name, one in probe.sections.items()})


def fit(*nodes: Answer | SshError, config: RunConfig = BARE, ahead_s: float = 0.0, **options: bool) -> Fit:
    """What is known of nodes n1, n2, ..., of which the first one's clock is ahead."""
    fleet = FakeFleet({f"n{place}": node for place, node in enumerate(nodes, 1)}, ahead_s={"n1": ahead_s})
    return check_launch(fleet.hosts, config, connect=fleet.connect, **options)


def unfit(*nodes: Answer | SshError, config: RunConfig = BARE, **options: Any) -> list[NodeProblem]:
    with pytest.raises(UnfitNodesError) as caught:
        fit(*nodes, config=config, **options)
    return list(caught.value.problems)


def problems(*nodes: Answer | SshError, config: RunConfig = BARE, **options: Any) -> list[str]:
    return [str(problem) for problem in unfit(*nodes, config=config, **options)]


def test_healthy_nodes_have_no_problem() -> None:
    assert [facts.node for facts in fit(*[node()] * 4).nodes] == ["n1", "n2", "n3", "n4"]
    for whole in (*[fit(*[node(profile=name)] * 2, config=config)
                    for name, config in (("none", BARE), ("h100x8", NCCL), ("none", DOCKER))],
                  fit(*[node(profile="h100x8")] * 2, config=NCCL, health=True)):  # fmt: skip
        assert whole.warnings == ()
    (first, *_), (inside,) = whole.nodes, fit(node(), config=DOCKER).nodes
    assert read_node(first) == SshNode(first, read_resources(first), "/usr/bin/python3", (H100,) * 8)
    assert (read_node(inside).python, read_node(inside).gpus) == ("", ())
    (odd,) = fit(node("product_name=N/A", "fb_memory_usage>total=N/A", profile="h100x8"), config=GLOO).nodes
    assert read_node(odd).gpus == (Gpu("", 0), *[H100] * 7)


# What is wrong on a node, and what is said of it; what begins with `risk` may be forced.
ROWS = """
$OFFER = launch.node
[none bare]
$OFFER/locks={"n1": "r1"} | risk launch.holder: run r1 holds it; wait for its end, end it with `burst cancel r1`
$OFFER/room=[524288000, ""] | launch.folder: 500 MiB free under ~/.burst, expected at least 1.0 GiB; make room
$OFFER/room=[null, "not writable"] | launch.folder: not writable; set cluster.node_folder to a folder of yours
$OFFER/data=[{"path": "/a", "problem": "no such file"}] | launch.data: data /a: no such file; bring it there under this
$OFFER/port=[null, "port 2: in use"] | launch.port: no port for the rendezvous: port 2: in use; free it, or set
cluster.python=/opt/none & host.software!0 null | host.python: cannot run /opt/none, expected Python 3.11 or newer
host.software/modules.torch=null | host.python: /usr/bin/python3 has no torch; install it there, or set cluster.python
cluster.interface=ib9 | net.interface: there is no interface ib9; there are lo, eth0, expected an interface that others
ib.ports!1 - | launch.adapters: ib.ports: exit code 1 (-); run the check again
[none docker]
host.image!1 Error: No such image: burst:1 | host.image: burst:cuda is not on the node; distribute it with `burst image
[h100x8 nccl]
fb_memory_usage>used*=4000 MiB | risk gpu.busy GPU 0, GPU 1, GPU 2, GPU 3, GPU 4, GPU 5, GPU 6, GPU 7: 4000 MiB in use
cluster.ranks_per_node=9 | launch.ranks: 8 GPUs, expected one for each of 9 ranks; set cluster.ranks_per_node to fewer
[none nccl]
gpu.smi!127 - | launch.ranks: 0 GPUs, expected one for each of 4 ranks; set cluster.backend=gloo to run on the CPU
"""


@pytest.mark.parametrize("row", [*rows(ROWS)], ids=str)
def test_a_problem_is_named_with_what_to_do(row: Row) -> None:
    (problem,) = unfit(node(row=row), config=row.config)
    ((words,),) = [row.findings]
    assert str(problem).startswith(f"n1: {words.removeprefix('risk ')}")
    assert problem.is_risk is words.startswith("risk ")


def test_a_node_whose_agent_cannot_answer_says_so_once() -> None:
    (text,) = problems(node(f"{NAME}!1 Traceback\\nburst needs Python 3.9 or newer as python3"))
    assert "launch.folder" in text
    assert "(burst needs Python 3.9 or newer as python3)" in text


def test_gpus_that_cannot_be_counted_do_not_pass() -> None:
    lost = node("gpu.smi!15 Unable to determine the device handle for GPU0", profile="h100x8")
    words = "launch.ranks: nvidia-smi: a GPU is lost: Unable to determine the device handle"
    assert any(words in text for text in problems(lost, config=NCCL))
    assert fit(lost, config=GLOO).warnings == ()


def test_all_problems_are_told_at_once_and_once_for_all_nodes_that_have_them() -> None:
    sick = node(f'{NAME}/room=[{10 << 20}, ""]', f'{NAME}/port=[null, "none"]')
    held, gone = node(NAME + '/locks={"n4": "r9"}'), SshError("n5", SshFailure.TIMEOUT, "silent")
    assert sorted(text.partition(";")[0] for text in problems(sick, sick, sick, held, gone, ahead_s=60)) == [
        "n1: launch.port: no port for the rendezvous: none",  # only the first node needs one
        "n1: ssh.clock: its clock is 60 s ahead of most nodes, expected within 1 s of most nodes",
        "n4: launch.holder: run r9 holds it",
        "n5: ssh.reach: silent, expected a connection",
        "n[1-3]: launch.folder: 10 MiB free under ~/.burst, expected at least 1.0 GiB",
    ]


TEXT = {"format": "text", "paths": ["/a"]}


@pytest.mark.parametrize(
    ("cluster", "data", "change", "text"),
    [
        ("bare", TEXT, "host.software/modules.torch=2.11.0", "host.versions: Python 3.11, torch 2.11.0, NCCL 2.27.5"),
        ("bare", TEXT, "host.software/python=3.12.9", "host.versions: Python 3.12, torch 2.9.1+cu128, NCCL 2.27.5"),
        ("docker", TEXT, "host.image/Created=x", "host.versions: image "),
        ("bare", TEXT, f"{NAME}/data.0.bytes=14", "launch.data /a: 12 files, 14 bytes, dddddddd"),
        # A corpus made of the standard library needs the very same Python.
        ("bare", {}, "host.software/python=3.11.10", "launch.python: Python 3.11.10, expected Python 3.11.9, as 2 of"),
    ],
)
def test_what_differs_is_a_risk_that_names_the_odd_node_also_of_two(
    cluster: str, data: dict[str, Any], change: str, text: str
) -> None:
    config = run_config(cluster=CLUSTERS[cluster], data=data)
    (told,) = problems(node(), node(), node(change), config=config)
    assert told.startswith(f"n3: {text}")
    assert len(fit(node(), node(), node(change), config=config, force=True).warnings) == 1
    both = problems(node(), node(change), config=config)
    assert len(both) == 2
    assert all("no value has a majority" in one for one in both)


def test_what_matters_to_other_runs_or_was_not_looked_at_stops_nothing() -> None:
    patched = node("host.software/python=3.11.10")
    assert fit(node(), node(), patched, config=run_config(data=TEXT)).warnings == ()
    (warning,) = fit(node(), node(f'{NAME}/data.0={{"path": "/a", "files": 12, "bytes": 13, "digest": null}}')).warnings
    assert warning.startswith("n2: launch.data /a: the node did not tell, expected 12 files, 13 bytes, dddddddd")


def test_numbers_of_gpus_that_differ_need_a_decision() -> None:
    mixed = (node(gpus=8), node(gpus=8), node(gpus=4))
    assert problems(*mixed) == [
        f"{names}: launch.ranks: {count} GPUs, expected as many on every node; set cluster.ranks_per_node, or take "
        "nodes that are alike"
        for names, count in (("n[1-2]", 8), ("n3", 4))
    ]
    assert fit(*mixed, config=GLOO).warnings == ()
    (five,) = problems(*mixed, config=run_config(cluster={"ranks_per_node": 5}))
    assert five.startswith("n3: launch.ranks: 4 GPUs, expected one for each of 5 ranks; ")


def test_force_makes_risks_warnings_and_nothing_else() -> None:
    risky, broken = node(NAME + '/locks={"n1": "r1"}'), node(f'{NAME}/room=[null, "read-only"]')
    with pytest.raises(UnfitNodesError, match="To start all the same, add --force") as caught:
        fit(risky)
    assert caught.value.exit_code == 1
    assert fit(risky, force=True).warnings[0].startswith("n1: launch.holder: run r1 holds it")
    folder = "n2: launch.folder: read-only; set cluster.node_folder to a folder of yours"
    assert problems(risky, broken, force=True) == [folder]


def test_health_is_looked_at_where_it_is_asked_for_and_that_of_gpus_where_ranks_use_them() -> None:
    def groups(backend: str, *, health: bool) -> set[str]:
        selection, found = launch_checks(ClusterConfig(backend=backend), health=health, with_gpus=backend != "gloo")
        return {group.name for group in CheckOptions(found, selection).groups}

    assert [groups(one, health=True) for one in ("gloo", "auto")] == [{"net", "host"}, {"gpu", "ib", "net", "host"}]
    assert groups("nccl", health=False) == {"gpu", "net", "host"}
    selection, found = launch_checks(ClusterConfig(), health=True, with_gpus=True)
    known = {name for group in found for name in group.explanations()} | SSH.keys()
    assert {name for name in EXPLANATIONS if selection.wants(name)} <= known
    assert all(map(selection.wants, ("gpu.xid", "gpu.clocks", "ib.mtu", "host.nccl_conf")))
    assert launch_checks(DOCKER.cluster, health=True, with_gpus=True)[0].wants("host.docker_gpu")
    assert not any(map(selection.wants, ("gpu.dcgm_diag", "host.image", "host.memory_free", "net.pairs")))
    # Under auto nodes that all lack GPUs compute on the CPU: what nobody answered of adapters is no matter.
    too_few = run_config(cluster={"ranks_per_node": 4})
    assert fit(node(), node(), node(gpus=1), config=too_few, health=True).warnings == ()
    sick = node("kernel.log!1 denied", profile="h100x8")
    assert any("gpu.xid" in text for text in fit(sick, sick, health=True, force=True).warnings)


def test_a_failure_stops_a_launch_what_is_odd_or_unseen_warns() -> None:
    def report(severity: Verdict) -> FleetReport:
        found = [Finding("gpu.ecc", name, severity, "3 errors", "none", "reset it", "GPU 1") for name in ("n1", "n2")]
        return FleetReport({one.node: NodeReport(one.node, (one,)) for one in found}, notes=("the clock here is odd",))

    text = "n[1-2]: gpu.ecc GPU 1: 3 errors, expected none; reset it"
    with pytest.raises(UnfitNodesError, match="To start all the same") as caught:
        judge_report(report(Verdict.FAIL), Selection())
    assert [str(problem) for problem in caught.value.problems] == [text]
    assert judge_report(report(Verdict.FAIL), Selection(), force=True) == ("the clock here is odd", text)
    for severity in (Verdict.WARN, Verdict.UNKNOWN):
        assert judge_report(report(severity), Selection())[1:] == (text,)


@pytest.mark.parametrize(
    ("section", "changes", "module"),
    [
        ("data", {"tokenizer": "bpe"}, ["tokenizers"]),
        ("data", {"tokenizer": "bpe", "format": "shards"}, []),
        ("data", {"format": "jsonl", "messages_field": "messages"}, ["jinja2"]),
        ("data", {"format": "parquet"}, ["pyarrow"]),
        ("memory", {"moments_dtype": "int8"}, ["torchao"]),
        ("train", {"tensorboard": True}, ["tensorboard"]),
    ],
)
def test_modules_that_only_some_runs_import_are_asked_for_by_those(
    section: str, changes: dict[str, Any], module: list[str]
) -> None:
    config = run_config(**{section: changes})
    assert needed_modules(config) == ("torch", "numpy", "yaml", "safetensors", *module)
    asked = CheckOptions(all_groups=(*GROUPS, launch_group(config))).question(config.cluster)
    assert asked["settings"]["BURST_MODULES"].split() == ["torch", "numpy", "yaml", "safetensors", *module]


def offer(told: dict[str, Any]) -> NodeFacts:
    return NodeFacts(NodeProbe("n1", {NAME: ended(NAME, json.dumps(told))}), ClusterConfig())


ODD = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(sorted(OFFER)), value=ODD | st.dictionaries(st.sampled_from(["n1", "path"]), ODD))
def test_an_answer_that_lies_is_an_offer_or_unreadable(key: str, value: Any) -> None:
    try:
        found = read_resources(offer({**OFFER, key: value}))
    except UnreadableError:
        return
    assert "\x1b" not in repr(found)
    assert found.home.startswith("/")


@pytest.mark.parametrize("home", ["relative", "/home/../etc", "/a\nb", 7])
def test_a_path_that_would_leave_its_folder_is_no_answer(home: object) -> None:
    with pytest.raises(UnreadableError, match="no absolute path"):
        read_resources(offer({**OFFER, "home": home}))


PART = checkpoint_bytes(RunConfig()) // 2  # of each of two nodes


def free_disk(free: int, disk: str = "") -> Answer:
    return node(f'{NAME}/checkpoint_room=[{free}, ""]', f"{NAME}/checkpoint_disk={disk}")


def saving_config(**checkpoint: Any) -> RunConfig:
    return run_config(cluster={"nodes": "n[1-2]", "num_nodes": 2}, train={"checkpoint": {"at_end": True, **checkpoint}})


@pytest.mark.parametrize(
    ("disks", "named"),
    [
        ([(PART - 1, "a"), (PART, "b")], "n1: launch.checkpoint: its part of a checkpoint takes"),
        ([(PART, "a"), (PART, "a")], "n[1-2]: launch.checkpoint: a checkpoint takes"),
        ([(2 * PART, "a"), (2 * PART - 1, "a")], "n[1-2]: launch.checkpoint: a checkpoint takes"),
    ],
)
def test_a_node_whose_disk_holds_no_checkpoint_is_refused(disks: list[tuple[int, str]], named: str) -> None:
    nodes = [free_disk(*disk) for disk in disks]
    (problem,) = unfit(*nodes, config=saving_config())
    assert str(problem).startswith(named), "the parts of all nodes that share a disk must fit there, and no more"
    assert f"but ~/.burst/runs has {binary_bytes(min(disks)[0])} free; free space, then launch again" in str(problem)
    assert fit(*nodes, config=saving_config(), force=True).warnings == (str(problem),)


@pytest.mark.parametrize("disks", [("a", "b"), ("a", "a"), ("", "")])
def test_disks_that_hold_their_parts_of_a_checkpoint_do(disks: tuple[str, str]) -> None:
    free = 2 * PART if disks == ("a", "a") else PART
    assert fit(*[free_disk(free, disk) for disk in disks], config=saving_config()).warnings == ()


def test_a_folder_that_all_nodes_share_holds_the_whole_checkpoint() -> None:
    cluster = {"nodes": "n[1-2]", "num_nodes": 2, "shared_folder": "/shared"}
    checkpoint = {"at_end": True, "folder": "/shared/.burst-me/checkpoints"}
    config = run_config(cluster=cluster, train={"checkpoint": checkpoint})
    (text,) = problems(free_disk(PART, "a"), free_disk(PART, "b"), config=config)
    assert text.startswith("n[1-2]: launch.checkpoint: a checkpoint takes")


def test_room_for_one_checkpoint_and_not_for_all_that_are_kept_is_a_warning() -> None:
    nodes = [free_disk(3 * PART - 1, "a"), free_disk(3 * PART, "b")]
    (warning,) = fit(*nodes, config=saving_config(every_steps=1)).warnings
    assert warning.startswith("n1: launch.checkpoint: its part of a checkpoint takes")
    assert "lower train.checkpoint.keep_last" in warning


def test_a_run_that_saves_nothing_needs_no_room_for_checkpoints() -> None:
    assert fit(free_disk(0), free_disk(0)).warnings == ()


def test_a_folder_of_checkpoints_that_cannot_be_written_is_named() -> None:
    locked = node(f'{NAME}/checkpoint_room=[null, "/out is not writable"]')
    (text,) = problems(locked, node(), config=saving_config(folder="/out"))
    assert text.startswith("n1: launch.checkpoint: /out is not writable; set train.checkpoint.folder")


def test_a_source_that_no_node_has_is_refused_before_ranks_start() -> None:
    lost, held = node(f"{NAME}/has_source=false"), node(f"{NAME}/has_source=true")
    config = saving_config(resume_from="/old/checkpoints")
    (problem,) = unfit(lost, lost, config=config, force=True)
    assert str(problem) == (
        "n[1-2]: launch.source: train.checkpoint.resume_from=/old/checkpoints holds no checkpoints, expected on one "
        "node at least a run folder or one of its checkpoints; copy them there, or name a folder that is there"
    )
    assert fit(lost, held, config=config).warnings == ()


def with_weights(*, hidden_size: int = 256, **data: Any) -> RunConfig:
    model = {"init_from": "/m", "hidden_size": hidden_size, "vocab_size": 512}
    return run_config(model=model, data={"format": "text", "paths": ["/a"], **data})


def model_folder(*, has_tokenizer: bool, document: dict[str, Any] | None = None, problem: str = "") -> Answer:
    """A node whose /m holds the model of `with_weights`, or `document`."""
    config = config_json(with_weights().model, seq_len=1024, window_tokens=None, dtype="float32")
    told = {"problem": problem, "config": document or (None if problem else config), "has_tokenizer": has_tokenizer}
    return node(f"{NAME}/model={json.dumps(told)}")


@pytest.mark.parametrize(
    ("config", "folder", "words"),
    [
        (with_weights(tokenizer="bytes"), {"has_tokenizer": True}, "data.tokenizer=bytes: the weights of"),
        (with_weights(hidden_size=128), {"has_tokenizer": False}, "model.init_from=/m holds another model: model.hid"),
        (with_weights(), {"has_tokenizer": False, "document": {"model_type": "gpt2"}}, "model.init_from: /m/config.js"),
        (with_weights(), {"has_tokenizer": False, "problem": "Is a directory"}, "/m/config.json cannot be read: Is a"),
    ],
)
def test_first_weights_that_contradict_the_run_are_refused_before_ranks_start(
    config: RunConfig, folder: dict[str, Any], words: str
) -> None:
    (text,) = problems(*[model_folder(**folder)] * 2, config=config, force=True)
    assert text.startswith(f"n[1-2]: launch.model: {words}")


def test_first_weights_of_the_configured_model_fit() -> None:
    assert fit(model_folder(has_tokenizer=False), config=with_weights(tokenizer="bytes")).warnings == ()
    assert fit(model_folder(has_tokenizer=True), config=with_weights(tokenizer="/m")).warnings == ()
