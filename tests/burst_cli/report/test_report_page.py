"""The page of `burst report`: whole, self-contained, safe."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_samples import make_methods, make_run, variant

from benchmarks.report_runs import make_runs

_HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>$\\frac{x}{'
ROOT = Path(__file__).resolve().parents[3]


class Structure(HTMLParser):
    """Tags, texts by tag and links of a page; fails on a tag that is closed in the wrong order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes = Counter[str](), set[str]()
        self.links, self.texts, self._open = list[str](), list[tuple[str, str]](), list[str]()
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value]
        self.links += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for _, value in attrs))
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.append((self._open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


@pytest.fixture(scope="module")
def methods_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three methods at two lengths."""
    folder = tmp_path_factory.mktemp("methods")
    make_methods(folder)
    return folder


@pytest.fixture
def methods(burst, methods_dir: Path):
    """`burst report` of the runs of several methods."""
    return lambda *words: burst("report", "--runs-dir", str(methods_dir), *words)


@pytest.fixture
def page_of(burst, tmp_path: Path):
    """The page that `burst report` writes of the runs in a folder."""

    def written(runs_dir: Path, *words: str) -> Structure:
        file = tmp_path / "page" / "r.html"
        result = burst("report", "--runs-dir", str(runs_dir), "--output", str(file), *words)
        assert result.code == 0, result.err
        return Structure(file.read_text(encoding="utf-8"))

    return written


# --- what is on the page ----------------------------------------------------------------------------------------------


def test_page_has_every_section_once(page_of, methods_dir: Path) -> None:
    page = page_of(methods_dir)
    assert page.of("h1") == ["burst report: tiny"]
    assert page.of("h2") == ["tiny · 2 × cpu", "How to read this"]
    assert page.tags["details"] == 1
    assert page.of("figcaption") == [
        "Tokens/s per device",
        "MFU, causal-aware (%)",
        "Peak memory (GiB)",
        "Memory predictions are +5% to +5% off what was measured",
        "Training loss",
        "Step time (s)",
    ]
    assert not {"script", "iframe", "object", "link"} & set(page.tags)
    assert not [name for name in page.attributes if name.startswith("on")]
    assert {link.partition(",")[0] for link in page.links} == {"data:image/svg+xml;base64"}
    assert any("prefers-color-scheme: dark" in text for text in page.of("style"))


def test_a_figure_above_the_peak_is_flagged(page_of, tmp_path: Path) -> None:
    for figure in ("mfu", "hfu"):
        make_run(tmp_path / figure, "tiny/20260101-000001-aaaaaa", **{figure: 1.2})
        page = page_of(tmp_path / figure)
        assert page.of("figcaption") == ["Training loss", "Step time (s)"]
        assert ("120% !" in page.of("td"), any("cannot be" in text for text in page.of("p"))) == (True, True)


def test_page_begins_with_warnings(page_of, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"  # warnings come first
    (folder / "tiny/20260101-000000-aaaaaa").mkdir(parents=True)
    (folder / "tiny/20260101-000000-aaaaaa/run.json").write_text("{")
    assert page_of(folder).of("summary")[0] == "2 warnings"


def test_heading_names_the_experiments(page_of, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    (folder / "tiny/20260101-000000-aaaaaa").mkdir(parents=True)
    (folder / "tiny/20260101-000000-aaaaaa/run.json").write_text("{")
    assert page_of(tmp_path / "nothing").of("h1") == ["burst report: no runs"]
    for exp, heading in (("a", "a, tiny"), ("b", "a, b, tiny"), ("c", "a, b, c and 1 more")):
        make_run(folder, f"{exp}/2025010{ord(exp) - 96}-000000-aaaaaa", steps=0)
        assert page_of(folder).of("h1") == [f"burst report: {heading}"]


def headings_of(page: Structure) -> list[str]:
    """Of the first table: its heads before the first run."""
    heads = page.of("th")
    return heads[: next(i for i, head in enumerate(heads) if "/" in head and head[-6:].isalnum() and "-" in head)]


def test_main_figures_come_first_in_a_table(page_of, methods_dir: Path) -> None:
    headings = headings_of(page_of(methods_dir))
    figures = headings[headings.index("steps") + 1 :]
    assert figures[:3] == ["tokens/s/device", "MFU (causal-aware)", "train loss"], headings


def test_a_wide_table_says_that_it_scrolls(page_of, methods_dir: Path) -> None:
    assert any("scroll the table" in text for text in page_of(methods_dir).of("p")), (
        "nothing says that columns are beyond"
    )


def test_a_run_in_progress_says_how_far_it_is(page_of, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "tiny/20260101-000001-aaaaaa", config=variant("ring", steps=16), final="running")
    assert "4 / 16 (25%)" in page_of(tmp_path / "runs").of("td")


@pytest.mark.parametrize(("final", "refreshes"), [("running", True), ("completed", False), ("failed", False)])
def test_a_page_loads_itself_again_only_while_a_run_is_in_progress(
    page_of, tmp_path: Path, final: str, refreshes: bool
) -> None:
    make_run(tmp_path / "runs", "tiny/20260101-000001-aaaaaa", final=final)
    page_of(tmp_path / "runs")
    html = (tmp_path / "page/r.html").read_text(encoding="utf-8")
    assert ('http-equiv="refresh"' in html) is refreshes


# --- self-contained and safe ------------------------------------------------------------------------------------------


def test_hostile_names_stay_text_everywhere(page_of, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for place in range(2):
        run = make_run(runs, f"tiny/20260101-00000{place}-aaaaaa", config=variant("ring", 512 * (place + 1)))
        for name in ("summary.json", "provenance.json"):
            (run.path / name).write_text(json.dumps(hostile(json.loads((run.path / name).read_text()))))
    (runs / "tiny").rename(runs / "<script>x<")
    (runs / "<script>x</20260101-000002-aaaaaa").mkdir()
    (runs / "<script>x</20260101-000002-aaaaaa/run.json").write_text(json.dumps({"state": "<script>"}))
    found = page_of(runs, "--compare", "20260101-000000", "20260101-000001")
    assert (found.tags["script"], found.tags["img"]) == (0, found.tags["figure"])
    assert not [name for name in found.attributes if name.startswith("on")]
    assert any("alert(1)" in text for _, text in found.texts)


def hostile(value: object) -> object:
    """Every text becomes hostile."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()} | {_HOSTILE: _HOSTILE}
    if isinstance(value, list):
        return [hostile(item) for item in value] or [_HOSTILE]
    return _HOSTILE if isinstance(value, str) else value


def test_page_is_written_without_matplotlib(methods_dir: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from burst_cli.app import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "report", "--runs-dir", str(methods_dir), "--output", f"{tmp_path}/r.html"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    found = Structure((tmp_path / "r.html").read_text())
    assert found.tags["figure"] == 0
    assert any("matplotlib is not installed" in text for text in found.of("p"))


def test_many_runs_take_no_longer_each_than_few(tmp_path: Path) -> None:
    few, many, seconds = 20, 200, dict[int, float]()
    for runs in (few, many):
        folder, output = tmp_path / str(runs), tmp_path / f"{runs}.html"
        make_runs(folder, runs)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "burst_cli", "report", "--runs-dir", str(folder), "--output", str(output)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (result.returncode, f"{runs} runs" in result.stdout) == (0, True), result.stderr
        assert output.stat().st_size > 400 * runs
        seconds[runs] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds[many] < many / few * seconds[few]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["r.html", "r.csv"])
def test_output_replaces_reports_only(methods, tmp_path: Path, name: str) -> None:
    file = tmp_path / "new" / name
    assert [methods("000001", "--output", str(file)).code for _ in range(2)] == [0, 0]
    document = json.loads(methods("--json", "--output", str(file)).out)
    assert (document["output"], len(document["runs"])) == (str(file), 6)
    assert name == "r.html" or len(file.read_text().splitlines()) == 7
    file.write_text("my thesis")
    refused = methods("--output", str(file))
    assert (refused.code, "is no report that burst wrote" in refused.err) == (2, True)
    assert file.read_text() == "my thesis"


def test_places_that_cannot_be_written_are_refused(methods, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "file").write_text("")
    for place, words in (("folder.csv", "is a folder"), ("file/r.csv", "is no folder"), ("pipe.csv", "a pipe")):
        refused = methods("--output", str(tmp_path / place))
        assert (refused.code, words in refused.err) == (2, True)
