"""The page of `burst report`: whole, self-contained, safe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_samples import make_run, variant

from burst_cli.report.build import Request, build_report
from burst_cli.report.draw import panel_svg
from burst_cli.report.panels import Line, Panel, Point
from burst_cli.report.write import report_page

_HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>$\\frac{x}{'
FORMATS = {"r.md": "md", "r.csv": "csv", "r.json": "json", "r.tex": "latex", "r.txt": "table"}
ROOT = Path(__file__).resolve().parents[3]


class Structure(HTMLParser):
    """Tags, texts by tag, ids and links of a page; fails on a tag that is closed in the wrong order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        found = dict(attrs)
        self.attributes |= set(found)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value]
        self.links += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for value in found.values()))
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


def page_of(runs_dir: Path, **request: object) -> Structure:
    return Structure(report_page(build_report(Request(runs_dir, is_page=True, **request)))[0])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page(methods_dir: Path) -> Structure:
    return page_of(methods_dir)


# --- what is on the page ----------------------------------------------------------------------------------------------


def test_page_has_every_section_once_and_titles_that_say_what_is_seen(page: Structure) -> None:
    assert page.of("h1") == ["burst report: tiny"]
    assert page.of("h2") == ["tiny · 2 × cpu", "How to read this"]
    assert (page.tags["figure"], page.tags["details"]) == (6, 1)
    assert page.of("figcaption")[:4] == [
        "burst/full is fastest at 1K: 1K tokens/s, 1.99× ring/full",
        "MFU at 1K: 10% with burst/full, 5% with ring/full",
        "burst/full and ring/full need the same memory at 1K: 1 GiB",
        "Memory predictions are +5% to +5% off what was measured",
    ]


def test_a_figure_above_the_peak_is_flagged(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny/20260101-000001-aaaaaa", config=variant("ring", 512), mfu=1.2)
    page = page_of(tmp_path)
    assert "120% !" in page.of("td")
    assert any("cannot be" in text for text in page.of("p"))


def test_one_run_has_its_curves_and_no_comparison(tmp_path: Path) -> None:
    make_run(tmp_path, "tiny/20260101-000000-aaaaaa")
    assert page_of(tmp_path).of("figcaption") == ["Training loss", "Seconds per step over the run"]


def test_failed_gates_and_warnings_come_first(methods_dir: Path, tmp_path: Path) -> None:
    found = page_of(methods_dir, fail_below=("mfu=7%",), statuses=("completed",))
    assert found.of("h2")[0] == "1 of 5 gate checks failed"
    (tmp_path / "tiny/20260101-000000-aaaaaa").mkdir(parents=True)
    (tmp_path / "tiny/20260101-000000-aaaaaa/run.json").write_text("{")
    assert "2 warnings" in page_of(tmp_path).of("summary")
    assert page_of(tmp_path / "nothing").of("h1") == ["burst report: no runs"]


# --- self-contained and safe ------------------------------------------------------------------------------------------


def test_page_fetches_nothing_runs_nothing_and_follows_the_colour_scheme(page: Structure, methods_dir: Path) -> None:
    assert not {"script", "iframe", "object", "link"} & set(page.tags)
    assert not [name for name in page.attributes if name.startswith("on")]
    assert {link.partition(",")[0] for link in page.links} == {"data:image/svg+xml;base64"}
    html = report_page(build_report(Request(methods_dir)))[0]
    assert "prefers-color-scheme: dark" in html


def test_hostile_names_stay_text_everywhere(burst, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for place in range(2):
        run = make_run(runs, f"tiny/20260101-00000{place}-aaaaaa", config=variant("ring", 512 * (place + 1)))
        for name in ("summary.json", "provenance.json"):
            (run.path / name).write_text(json.dumps(hostile(json.loads((run.path / name).read_text()))))
    (runs / "tiny").rename(runs / "<script>x<")
    (runs / "<script>x</20260101-000002-aaaaaa").mkdir()
    (runs / "<script>x</20260101-000002-aaaaaa/run.json").write_text(json.dumps({"state": "<script>"}))
    found = page_of(runs, compare=("20260101-000000", "20260101-000001"), baseline=None)
    assert (found.tags["script"], found.tags["img"]) == (0, found.tags["figure"])
    assert not [name for name in found.attributes if name.startswith("on")]
    assert any("alert(1)" in text for _, text in found.texts)
    assert burst("report", "--output", str(tmp_path / "x.csv")).code == 0


def hostile(value: object) -> object:
    """Every text becomes hostile."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()} | {_HOSTILE: _HOSTILE}
    if isinstance(value, list):
        return [hostile(item) for item in value] or [_HOSTILE]
    return _HOSTILE if isinstance(value, str) else value


def test_names_that_matplotlib_would_interpret_are_drawn_as_they_are() -> None:
    points = (Point(512, 1.0, 0.9, 1.1), Point(1024, 2.0, 1.9, 2.1))
    panel = Panel("mfu", "lines", "t", "x", "y", (Line("_$\\frac{$<b>", 0, points), Line("漢字", 9, points)))
    svg = panel_svg(panel)
    assert ("_$\\frac{$&lt;b&gt;" in svg, "漢字" in svg) == (True, True)


def test_page_is_written_without_matplotlib_and_says_what_is_missing(methods_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from burst_cli.app import main; "
        f"sys.exit(main(['report', '--runs-dir', {str(methods_dir)!r}, *sys.argv[1:]]))"
    )

    def reported(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)

    result = reported("--output", str(tmp_path / "r.html"))
    assert result.returncode == 0, result.stderr
    found = Structure((tmp_path / "r.html").read_text())
    assert found.tags["figure"] == 0
    assert any("matplotlib is not installed" in text for text in found.of("p"))


# --- files ------------------------------------------------------------------------------------------------------------


def test_name_that_means_no_format_is_refused_with_those_that_do(methods, tmp_path: Path) -> None:
    for name in ("r.docx", "r"):
        refused = methods("--output", str(tmp_path / name))
        assert refused.code == 2
        assert "ends in .html, .htm, .md, .csv, .json, .tex, .txt, or --format" in refused.err
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", FORMATS)
def test_output_takes_its_format_from_its_name_and_replaces_its_own_kind_alone(
    methods, tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    assert [methods("--output", str(file)).code for _ in range(2)] == [0, 0]
    assert file.read_text(encoding="utf-8") == methods("--format", FORMATS[name]).out
    file.write_text("my thesis")
    refused = methods("--output", str(file))
    assert (refused.code, "is no report that burst wrote" in refused.err) == (2, True)
    assert file.read_text() == "my thesis"


def test_html_goes_to_report_html_by_default_and_json_beside_it_is_one_document(
    methods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote report.html (6 runs, 6 plots)" in methods("--format", "html").out
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    document = json.loads(methods("--json", "--output", "r.html").out)
    assert (document["output"], len(document["runs"])) == ("r.html", 6)
    assert Path("r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert methods("--output", "new/folder/r.csv").code == 0  # as every --output makes it


def test_places_that_cannot_be_written_are_refused(methods, tmp_path: Path) -> None:
    (tmp_path / "folder.md").mkdir()
    os.mkfifo(tmp_path / "pipe.md")
    (tmp_path / "file").write_text("")
    for place, words in (("folder.md", "is a folder"), ("file/r.md", "is no folder"), ("pipe.md", "a pipe")):
        refused = methods("--output", str(tmp_path / place))
        assert (refused.code, words in refused.err) == (2, True)
