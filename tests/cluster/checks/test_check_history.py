"""Which nodes were bad before: kept for this user only, whole after crashes and concurrent checks, bounded."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.checks import history
from cluster.checks.finding import Verdict
from cluster.checks.history import Record, add_check, history_path, records

OK, FAIL, UNKNOWN = Verdict.OK, Verdict.FAIL, Verdict.UNKNOWN


def test_failures_of_the_last_checks_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "state" / "nodes.jsonl"
    for verdict in (FAIL, FAIL, OK, UNKNOWN, OK, FAIL):
        found = add_check(path, "prod", {"n1": verdict, "n2": OK})
    assert found == {"n1": Record(3, 5), "n2": Record(0, 5)}
    assert str(found["n1"]) == "failed 3 of the last 5 checks"


def test_clusters_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    add_check(path, "prod", {"n1": FAIL})
    assert add_check(path, "testbed", {"n1": OK}) == {"n1": Record(0, 1)}


def test_only_checks_with_the_node_count(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    add_check(path, "prod", {"n1": FAIL, "n2": OK})
    add_check(path, "prod", {"n2": OK})
    assert add_check(path, "prod", {"n1": OK}) == {"n1": Record(1, 2)}


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "nodes.jsonl"
    add_check(path, "prod", {"n1": OK})
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    add_check(path, "prod", {"n1": FAIL})
    with path.open("a") as file:
        file.write('{"cluster": "prod", "verdicts": {"FAIL": "n["}}\n{"cluster": "prod", "verdicts": 3}\n[1]\n{"cl')
    assert add_check(path, "prod", {"n1": OK}) == {"n1": Record(1, 2)}


@pytest.mark.parametrize("filled", [0, history.MAX_BYTES - 100], ids=["new", "to be cut"])
def test_checks_at_once_lose_nothing(tmp_path: Path, filled: int) -> None:
    path = tmp_path / "nodes.jsonl"
    path.write_text((json.dumps({"old": "x" * 989}) + "\n") * (filled // 1000))
    threads = [threading.Thread(target=add_check, args=(path, "prod", {f"n{n}": FAIL})) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row["verdicts"]["FAIL"] for row in rows if "old" not in row) == sorted(f"n{n}" for n in range(20))


def test_the_file_stays_small_and_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    old = json.dumps({"cluster": "prod", "verdicts": {"FAIL": "n1"}}) + "\n"
    path.write_text(old * (history.MAX_BYTES // len(old) + 1))
    add_check(path, "prod", {"n1": OK, "n9": OK})
    assert path.stat().st_size < 0.6 * history.MAX_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert '"n[1,9]"' in path.read_text().splitlines()[-1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["nodes.jsonl"]


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_path({}) == tmp_path / ".local/state/burst/nodes.jsonl"
    assert history_path({"XDG_STATE_HOME": "/x"}) == Path("/x/burst/nodes.jsonl")
    assert history_path({"XDG_STATE_HOME": "relative"}) == tmp_path / ".local/state/burst/nodes.jsonl"


ROWS = st.lists(
    st.dictionaries(st.sampled_from(["n1", "n2", "n3"]), st.sampled_from([OK, FAIL, UNKNOWN]), max_size=3), max_size=9
)


@given(ROWS, st.integers(1, 6))
def test_records_count_the_newest_checks_of_each_node(checks: list[dict[str, Verdict]], window: int) -> None:
    rows = [
        {
            "cluster": "prod",
            "verdicts": {
                verdict.value: ",".join(n for n, v in told.items() if v is verdict) for verdict in told.values()
            },
        }
        for told in checks
    ]
    found = records(rows, "prod", ["n1", "n2", "n3"], window=window)
    for node in ("n1", "n2", "n3"):
        newest = [told[node] for told in reversed(checks) if node in told][:window]
        assert found[node] == Record(sum(verdict is not OK for verdict in newest), len(newest))
