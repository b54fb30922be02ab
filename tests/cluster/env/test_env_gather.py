"""Facts from the answer of the real probe script, on this machine with the hardware of rehearsal nodes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from env_hardware import furnish, probe
from testkit.check_fakes import changed_section

from cluster.env.plan import check_network
from cluster.errors import ClusterError
from cluster.survey.facts import NodeFacts
from cluster.survey.network import Carriers
from cluster.survey.section import NodeProbe, SectionState
from engine.config.cluster import ClusterConfig

CONFIG = ClusterConfig()


def facts_of(probe: NodeProbe) -> NodeFacts:
    facts = NodeFacts(probe, CONFIG)
    check_network(facts)
    return facts


def late(base: NodeProbe, name: str) -> NodeProbe:
    return changed_section(base, name, output="", exit_code=None, state=SectionState.TIMED_OUT)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> NodeProbe:
    """What a healthy h100x8 answers to everything."""
    with pytest.MonkeyPatch.context() as patch:
        furnish(tmp_path_factory.mktemp("h100"), patch, "h100x8")
        return probe()


@pytest.mark.parametrize("name", ["ib.ports", "net.links"])
def test_what_cannot_be_read_is_no_machine_without_infiniband(answer: NodeProbe, name: str) -> None:
    words = f"cannot tell what network it has: {name}: timed out. Look at it with `burst check-nodes --only ib,net "
    with pytest.raises(ClusterError, match=words):
        facts_of(late(answer, name))


UNTOLD = "ports that lead to storage servers are not known: env.carriers: timed out"


def test_what_else_cannot_be_read_is_not_known(answer: NodeProbe) -> None:
    def told(facts: NodeFacts) -> list[Any]:
        return [facts.adapters, facts.network, facts.interface, facts.gpu_addresses, facts.carriers, facts.reaches_gpus]

    *others, carriers, works = told(facts_of(answer))
    assert (carriers.trouble, works) == ("", True)
    assert told(facts_of(late(answer, "env.carriers"))) == [*others, Carriers(trouble=UNTOLD), works]
    assert told(facts_of(late(answer, "ib.gpudirect"))) == [*others, carriers, None]


def test_mounts_and_cores_are_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: NodeProbe
) -> None:
    root = furnish(tmp_path, monkeypatch, "h100x8")
    (root / "proc" / "mounts").write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        "nas:/export /my\\040data nfs4 rw,vers=4.2,clientaddr=192.0.2.2,local_lock=none,addr=198.51.100.7 0 0\n"
        "198.51.100.9@tcp:/lustre /scratch lustre rw 0 0\n"
        "//198.51.100.11/share /win cifs rw 0 0\n"
        "bad$(touch\\040/tmp/x):/e /odd nfs rw 0 0\n"
        "127.0.0.1:/e /own nfs rw 0 0\n"
        "198.51.100.12:/e /volume fuse.glusterfs rw 0 0\n"
    )
    facts = facts_of(replace(answer, sections={**answer.sections, **probe("env").sections}))
    assert facts.interface.interface is not None
    places = {"/my data": "7", "/scratch": "9", "/win": "11", "/volume": "12"}
    told = [(folder, f"198.51.100.{last}", facts.interface.interface.name) for folder, last in places.items()]
    assert [(one.mount_point, one.server, one.interface) for one in facts.carriers.storage] == told
    assert facts.carriers.cores == len(os.sched_getaffinity(0))
