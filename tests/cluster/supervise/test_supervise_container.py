"""A run whose command is `docker run`, on a real engine: the container ends with the run, however that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testkit import write_program
from testkit.image_rig import LauncherEngine, busybox_tree, launcher_engine
from testkit.machine_clock import machine_time
from testkit.supervise_rig import Rig, is_gone, kill
from testkit.waiting import wait_for

from cluster.agent.container import Container
from cluster.agent.start import start, sweep

POLITE = "trap 'echo finished; exit 0' TERM; echo ready; while :; do /bin/busybox sleep 0.1; done"
STUBBORN = "trap '' TERM; echo ready; while :; do /bin/busybox sleep 0.1; done"
IMAGE = "rig/busybox:1"


@pytest.fixture(scope="module")
def engine() -> Iterator[LauncherEngine]:
    with launcher_engine() as made:
        made("import", "-", IMAGE, stdin=busybox_tree())
        yield made


@pytest.fixture
def rig(tmp_path: Path, engine: LauncherEngine) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()
    assert made.processes() == []
    assert names(engine) == []


def names(engine: LauncherEngine) -> list[str]:
    return engine("ps", "--all", "--format", "{{.Names}}").split()


def launch(rig: Rig, engine: LauncherEngine, script: str, **changes: Any) -> int:
    """The pid of the supervisor of a container whose only process is rank 0."""
    command = ["docker", "--host", engine.host]
    name = f"burst-{rig.run_id}"
    marks = {"BURST_RUN_ID": rig.run_id, "BURST_NODE": rig.name(), "RANK": "0"}
    run = [*command, "run", "--name", name, "--label", f"org.burst.run={rig.run_id}", "--network", "none"]
    run += [word for item in marks.items() for word in ("--env", "=".join(item))]
    run += [IMAGE, "/bin/busybox", "sh", "-c", script]
    spec = rig.spec(argv=run, engine=command, container=name, local_ranks=1, **changes)
    answer = start(spec)
    assert "started" in answer, answer
    wait_for(lambda: b"ready" in log(rig), "the container")
    return int(answer["started"])


def log(rig: Rig) -> bytes:
    path = Path(rig.files().torchrun_log)
    return path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize(
    ("script", "act", "end"),
    [
        ("echo ready; exit 3", lambda rig: None, (3, "exit")),
        (POLITE, lambda rig: rig.stop(10.0), (0, "stop")),
        (STUBBORN, lambda rig: rig.stop(1.0), (137, "stop")),
        (STUBBORN, lambda rig: kill(rig.command()), (-9, "exit")),
    ],
    ids=["by itself", "asked", "after the grace", "with its killed client"],
)
def test_container_ends_with_the_run_and_is_removed(
    rig: Rig, engine: LauncherEngine, script: str, act: Callable[[Rig], None], end: tuple[int, str]
) -> None:
    launch(rig, engine, script)
    if script is not POLITE:
        begin = machine_time()
    else:
        wait_for(lambda: rig.ranks(), "the rank")
    act(rig)
    outcome = rig.outcome()
    assert ((outcome["exit_code"], outcome["cause"]), outcome["error"]) == (end, None)
    assert names(engine) == []
    if script is POLITE:
        assert b"finished" in log(rig)
        assert [death["rank"] for death in outcome["deaths"]] == [0]
    else:
        assert machine_time() - begin < 8.0


def test_sweep_removes_what_a_killed_supervisor_left(rig: Rig, engine: LauncherEngine) -> None:
    pid = launch(rig, engine, STUBBORN)
    kill(pid)
    wait_for(lambda: is_gone(pid), "the end of the supervisor")
    assert names(engine) == [f"burst-{rig.run_id}"]
    assert sweep(str(rig.folder / "alpha"), rig.name(), rig.run_id) == []
    assert names(engine) == []


LOOK = "container inspect --format {{json .Config.Labels}} name"
ENGINE = """cd {}; echo "$@" >>asked
case $1 in
    container) [ -e labels ] && exec cat labels; printf 'No such container: \\377' >&2; exit 1 ;;
    rm) [ ! -e stuck ] ;;
    *) sleep 0.3; echo "$@" >>asked ;;
esac"""


def test_an_engine_is_asked_by_exact_words_and_only_for_the_container_of_the_run(tmp_path: Path) -> None:
    engine = write_program(tmp_path / "engine", ENGINE.format(tmp_path))
    container, labels, threads = Container([str(engine)], "name", "run"), tmp_path / "labels", threading.active_count()

    def asked(act: Callable[[], object]) -> tuple[object, list[str]]:
        """What it gives, and what the engine was asked until all of that is over."""
        (tmp_path / "asked").write_text("")
        given = act()
        wait_for(lambda: threading.active_count() <= threads, "the end of what goes on in the background")
        return given, (tmp_path / "asked").read_text().splitlines()

    assert asked(lambda: container.remove(60.0)) == ("", [LOOK])
    given, words = asked(lambda: container.remove(60.0, 1.0))  # it may still appear
    assert (given, set(words), 1 < len(words) < 8) == ("", {LOOK}, True)
    for text, is_ours in (("null", False), ('{"of": "others"}', False), ("[]", False), ("no JSON", None)):
        labels.write_text(text)
        assert asked(container.is_ours) == (is_ours, [LOOK])
        assert asked(container.kill) == (None, [LOOK])
    labels.write_bytes(b'{"of": "run", "\xff": "\xff"}')
    for act, said in (
        (lambda: container.stop(0.5), "stop -t 1 name"),
        (lambda: container.stop(7.9), "stop -t 7 name"),
        (container.kill, "kill name"),
    ):
        assert asked(act) == (None, [LOOK, said, said])
    assert asked(lambda: container.remove(60.0)) == ("", [LOOK, "rm -f name"])
    (tmp_path / "stuck").touch()
    given, words = asked(lambda: container.remove(1.5))
    assert (given, set(words)) == ("the engine did not remove container name", {LOOK, "rm -f name"})
    assert 2 < len(words) < 16
