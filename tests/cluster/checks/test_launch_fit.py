"""Which nodes can carry a run: each problem by its words, all of them at once, and what --force takes."""

from __future__ import annotations

import json
from typing import Any

import host_sections
import pytest
from fabric_nodes import LO, default_route, link, net_probe
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.check_fakes import FakeFleet, answer, ended
from testkit.plan_fleet import run_config

from cluster.checks.finding import Finding, FleetReport, NodeReport, Verdict
from cluster.checks.groups.launch import NAME, launch_group, needed_modules, read_offer
from cluster.checks.launch import Fit, UnfitNodesError, check_launch, judge_report, launch_selection
from cluster.checks.run import CheckOptions
from cluster.checks.selection import GROUPS, Selection
from cluster.errors import SshError, SshFailure
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe, UnreadableError
from engine.config.cluster import ClusterConfig
from engine.config.settings import RunConfig

BARE = run_config()
DOCKER = run_config(cluster={"container": {"runtime": "docker", "image": "burst:1"}})
NCCL = run_config(cluster={"backend": "nccl", "ranks_per_node": 4})
NO_IMAGE = ("Error: No such image: burst:1", 1)
OFFER: dict[str, Any] = {
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
}
LACKS = [{"path": "/a", "problem": "no such file or folder"}]


def smi(gpus: int, used_mib: int = 1, processes: str = "") -> str:
    """What `nvidia-smi -q -x` says of so many H100."""
    one = (
        "<product_name>H100</product_name>"
        f"<fb_memory_usage><total>81559 MiB</total><used>{used_mib} MiB</used></fb_memory_usage>"
        f"<processes>{processes}</processes>"
    )
    rows = "".join(f'<gpu id="00000000:{number:02X}:00.0">{one}</gpu>' for number in range(1, gpus + 1))
    return f"<nvidia_smi_log><attached_gpus>{gpus}</attached_gpus>{rows}</nvidia_smi_log>"


def sections(number: int = 1, *, gpus: int = 0, **changes: Any) -> dict[str, Any]:
    """Answers of a healthy node with address 10.0.0.NUMBER; `launch={...}` and others change one, by its last word."""
    network = net_probe([LO, link("eth0", f"10.0.0.{number}/24")], [default_route("eth0")]).sections
    host = host_sections.healthy(software=host_sections.BARE_SOFTWARE).sections
    told: dict[str, Any] = {name: section.output for name, section in {**network, **host}.items()}
    devices = [[f"0000:{number:02x}:00.0", "0x030200", "0", "/x"] for number in range(1, gpus + 1)]
    told |= {
        "ib.ports": '{"ports": [], "broken": {}}',
        "gpu.lspci": json.dumps({"total": 99, "devices": devices}),
        "gpu.smi": smi(gpus) if gpus else ("", 127),
        NAME: json.dumps({**OFFER, **changes.pop("launch", {})}),
    }
    for name, change in changes.items():
        section = next(section for section in told if section.endswith(f".{name}"))
        if isinstance(change, dict):
            told[section] = json.dumps({**json.loads(told[section]), **change})
        else:
            told[section] = change
    return told


def fit(*nodes: dict[str, Any] | SshError, config: RunConfig = BARE, ahead_s: float = 0.0, **options: bool) -> Fit:
    """What is known of nodes n1, n2, ..., of which the first one's clock is ahead."""
    told = {f"n{place}": node if isinstance(node, SshError) else answer(node) for place, node in enumerate(nodes, 1)}
    fleet = FakeFleet(told, ahead_s={"n1": ahead_s})
    return check_launch(fleet.hosts, config, connect=fleet.connect, **options)


def problems(*nodes: dict[str, Any] | SshError, config: RunConfig = BARE, **options: Any) -> list[str]:
    with pytest.raises(UnfitNodesError) as caught:
        fit(*nodes, config=config, **options)
    return [str(problem) for problem in caught.value.problems]


def nodes(count: int, **changes: Any) -> tuple[dict[str, Any], ...]:
    return tuple(sections(number, **dict(changes)) for number in range(1, count + 1))


def test_healthy_nodes_have_no_problem() -> None:
    assert [facts.node for facts in fit(*nodes(4)).nodes] == ["n1", "n2", "n3", "n4"]
    for found in (fit(*nodes(2)), fit(*nodes(2, gpus=8), config=NCCL), fit(*nodes(2), config=DOCKER)):
        assert found.warnings == ()


NOT_WRITABLE, TAKEN = "/home/me is not writable", "port 29500: Address already in use"
RISKS = [
    (
        BARE,
        {"launch": {"locks": {"n1": "r1"}}},
        "launch.holder: run r1 holds it; wait for its end, end it with `burst canc",
    ),
    (
        NCCL,
        {"gpus": 8, "smi": smi(8, used_mib=4000)},
        "gpu.busy GPU 0, GPU 1, GPU 2, GPU 3, GPU 4, GPU 5, GPU 6, GPU 7",
    ),
]
MUSTS = [
    (BARE, {"launch": {"room": [500 << 20, ""]}}, "launch.folder: 500 MiB free under ~/.burst, expected at least 1.0"),
    (
        run_config(cluster={"python": "/opt/none"}),
        {"software": "null"},
        "host.python: cannot run /opt/none, expected Python",
    ),
    (
        BARE,
        {"software": {"modules": {"torch": None}}},
        "host.python: /usr/bin/python3 has no torch; install it there, or",
    ),
    (DOCKER, {"image": NO_IMAGE}, "host.image: burst:1 is not on the node; distribute it with `burst image push`"),
    (
        BARE,
        {"launch": {"room": [None, NOT_WRITABLE]}},
        f"launch.folder: {NOT_WRITABLE}; set cluster.node_folder to a folder",
    ),
    (BARE, {"launch": {"data": LACKS}}, "launch.data: data /a: no such file or folder; bring it there under this name"),
    (
        run_config(cluster={"interface": "ib9"}),
        {},
        "net.interface: there is no interface ib9; there are lo, eth0, expected",
    ),
    (BARE, {"launch": {"port": [None, TAKEN]}}, f"launch.port: no port for the rendezvous: {TAKEN}; free it, or set"),
    (
        NCCL,
        {"gpus": 2},
        "launch.ranks: 2 GPUs, expected one for each of 4 ranks; set cluster.ranks_per_node to fewer, or set",
    ),
    (NCCL, {}, "launch.ranks: 0 GPUs, expected one for each of 4 ranks; set cluster.backend=gloo to run on the CPU"),
    (BARE, {"ports": ("", 1)}, "launch.adapters: ib.ports: exit code 1; run the check again; see the evidence"),
]


@pytest.mark.parametrize(
    ("config", "changes", "text", "is_risk"), [*((*row, True) for row in RISKS), *((*row, False) for row in MUSTS)]
)
def test_a_problem_is_named_with_what_to_do(
    config: RunConfig, changes: dict[str, Any], text: str, is_risk: bool
) -> None:
    with pytest.raises(UnfitNodesError) as caught:
        fit(sections(**changes), config=config)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"n1: {text}")
    assert problem.is_risk is is_risk


def test_a_node_whose_agent_cannot_answer_says_so_once() -> None:
    told = {**sections(), NAME: ("Traceback\nburst needs Python 3.9 or newer as python3", 1)}
    (text,) = problems(told)
    assert "launch.folder" in text
    assert "(burst needs Python 3.9 or newer as python3)" in text


def test_gpus_that_cannot_be_counted_do_not_pass() -> None:
    lost = ("Unable to determine the device handle for GPU0", 15)
    texts = problems(sections(smi=lost, gpus=8), config=NCCL)
    assert any(
        "launch.ranks: nvidia-smi: a GPU is lost: Unable to determine the device handle" in text for text in texts
    )
    assert fit(sections(smi=lost), config=run_config(cluster={"backend": "gloo"})).warnings == ()


def test_all_problems_are_told_at_once_and_once_for_all_nodes_that_have_them() -> None:
    sick = {"launch": {"room": [10 << 20, ""], "port": [None, "none"]}}
    found = problems(
        *nodes(3, **sick),
        sections(4, launch={"locks": {"n4": "r9"}}),
        SshError("n5", SshFailure.TIMEOUT, "silent"),
        ahead_s=60,
    )
    assert sorted(text.partition(";")[0] for text in found) == [
        "n1: launch.port: no port for the rendezvous: none",  # only the first node needs one
        "n1: ssh.clock: its clock is 60 s ahead of most nodes, expected within 1 s of most nodes",
        "n4: launch.holder: run r9 holds it",
        "n5: ssh.reach: silent, expected a connection",
        "n[1-3]: launch.folder: 10 MiB free under ~/.burst, expected at least 1.0 GiB",
    ]


DIFFERENT = [
    (BARE, {"software": {"modules": {"torch": "2.11.0"}}}, "host.versions: Python 3.11, torch 2.11.0, NCCL 2.27.5"),
    (BARE, {"software": {"python": "3.12.9"}}, "host.versions: Python 3.12, torch 2.9.1+cu128, NCCL 2.27.5"),
    (DOCKER, {"image": {"Created": "x"}}, "host.versions: image "),
    (BARE, {"launch": {"data": [{**OFFER["data"][0], "bytes": 14}]}}, "launch.data /a: 12 files, 14 bytes, dddddddd"),
]


@pytest.mark.parametrize(("config", "changes", "text"), DIFFERENT)
def test_what_differs_is_a_risk_that_names_the_odd_node_also_of_two(
    config: RunConfig, changes: dict[str, Any], text: str
) -> None:
    config = run_config(
        cluster={"container": {"runtime": config.cluster.container.runtime, "image": "burst:1"}},
        data={"format": "text", "paths": ["/a"]},
    )
    (told,) = problems(*nodes(2), sections(3, **changes), config=config)
    assert told.startswith(f"n3: {text}")
    assert len(fit(*nodes(2), sections(3, **changes), config=config, force=True).warnings) == 1
    both = problems(sections(1), sections(2, **changes), config=config)
    assert len(both) == 2
    assert all("no value has a majority" in one for one in both)


def test_data_that_a_node_had_no_time_to_look_into_stop_nothing() -> None:
    late = sections(2, launch={"data": [{**OFFER["data"][0], "digest": None}]})
    (warning,) = fit(sections(1), late).warnings
    assert warning.startswith("n2: launch.data /a: the node did not tell, expected 12 files, 13 bytes, dddddddd")


def test_a_corpus_made_of_the_standard_library_needs_the_very_same_python() -> None:
    patched = sections(3, software={"python": "3.11.10"})
    assert problems(*nodes(2), patched)[0].startswith("n3: launch.python: Python 3.11.10, expected Python 3.11.9, as 2")
    text = run_config(data={"format": "text", "paths": ["/a"]})
    assert fit(*nodes(2), patched, config=text).warnings == ()


def test_numbers_of_gpus_that_differ_need_a_decision() -> None:
    mixed = (*nodes(2, gpus=8), sections(3, gpus=4))
    assert problems(*mixed) == [
        f"{names}: launch.ranks: {count} GPUs, expected as many on every node; set cluster.ranks_per_node, or take "
        "nodes that are alike"
        for names, count in (("n[1-2]", 8), ("n3", 4))
    ]
    assert fit(*mixed, config=NCCL).warnings == ()
    assert fit(*mixed, config=run_config(cluster={"backend": "gloo"})).warnings == ()
    (five,) = problems(*mixed, config=run_config(cluster={"ranks_per_node": 5}))
    assert five.startswith("n3: launch.ranks: 4 GPUs, expected one for each of 5 ranks; ")


def test_force_makes_risks_warnings_and_nothing_else() -> None:
    risky = sections(1, launch={"locks": {"n1": "r1"}})
    broken = sections(2, launch={"room": [None, "read-only"]})
    with pytest.raises(UnfitNodesError, match="To start all the same, add --force") as caught:
        fit(risky)
    assert caught.value.exit_code == 1
    assert fit(risky, force=True).warnings[0].startswith("n1: launch.holder: run r1 holds it")
    with pytest.raises(UnfitNodesError) as caught:
        fit(risky, broken, force=True)
    assert str(caught.value) == "n2: launch.folder: read-only; set cluster.node_folder to a folder of yours"


def test_health_is_looked_at_where_it_is_asked_for_and_that_of_gpus_where_ranks_use_them() -> None:
    def groups(backend: str, *, health: bool) -> set[str]:
        asked = launch_selection(ClusterConfig(backend=backend), health=health, with_gpus=backend != "gloo")
        return {group.name for group in CheckOptions(asked).groups}

    assert [groups(one, health=True) for one in ("gloo", "auto")] == [{"net", "host"}, {"gpu", "ib", "net", "host"}]
    assert groups("nccl", health=False) == {"gpu", "net", "host"}
    selection = launch_selection(ClusterConfig(), health=True, with_gpus=True)
    assert all(map(selection.wants, ("gpu.xid", "gpu.clocks", "ib.mtu", "host.nccl_conf")))
    assert launch_selection(DOCKER.cluster, health=True, with_gpus=True).wants("host.docker_gpu")
    assert not any(map(selection.wants, ("gpu.dcgm_diag", "host.image", "host.memory_free", "net.pairs")))
    # Under auto nodes that all lack GPUs compute on the CPU: what nobody answered of adapters is no matter.
    too_few = run_config(cluster={"ranks_per_node": 4})
    assert fit(*nodes(2), sections(3, gpus=1), config=too_few, health=True).warnings == ()
    assert any("gpu.xid" in text for text in fit(*nodes(2, gpus=8), health=True, force=True).warnings)


def test_a_failure_stops_a_launch_what_is_odd_or_unseen_warns() -> None:
    def report(severity: Verdict) -> FleetReport:
        found = [
            Finding("gpu.ecc", name, severity, "3 errors", "none", "reset the GPU", "GPU 1") for name in ("n1", "n2")
        ]
        return FleetReport({one.node: NodeReport(one.node, (one,)) for one in found}, notes=("the clock here is odd",))

    text = "n[1-2]: gpu.ecc GPU 1: 3 errors, expected none; reset the GPU"
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
def test_modules_that_only_some_runs_import_are_asked_for_by_those(section, changes, module) -> None:
    config = run_config(**{section: changes})
    assert needed_modules(config) == ("torch", "numpy", "yaml", "safetensors", *module)
    asked = CheckOptions(all_groups=(*GROUPS, launch_group(config))).question(config.cluster)
    assert asked["settings"]["BURST_MODULES"].split() == ["torch", "numpy", "yaml", "safetensors", *module]


def offer(told: dict[str, Any]) -> NodeFacts:
    return NodeFacts(NodeProbe("n1", {NAME: ended(NAME, json.dumps(told))}), ClusterConfig())


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(OFFER)), value=ODD | st.dictionaries(st.sampled_from(["n1", "path"]), ODD))
def test_an_answer_that_lies_is_an_offer_or_unreadable(key: str, value: Any) -> None:
    try:
        found = read_offer(offer({**OFFER, key: value}))
    except UnreadableError:
        return
    assert "\x1b" not in repr(found)
    assert found.home.startswith("/")


@pytest.mark.parametrize("home", ["relative", "/home/../etc", "/a\nb", 7])
def test_a_path_that_would_leave_its_folder_is_no_answer(home: object) -> None:
    with pytest.raises(UnreadableError, match="no absolute path"):
        read_offer(offer({**OFFER, "home": home}))
