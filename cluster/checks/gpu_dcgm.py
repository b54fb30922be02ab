"""What NVIDIA's own tool, dcgmi of DCGM 3 and 4, says of the GPUs: its health monitor and its diagnostic of level 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cluster.checks.check import Check
from cluster.checks.finding import Finding, Verdict
from cluster.checks.gpu_view import GpuView
from cluster.remote_text import one_line
from cluster.survey.section import NodeProbe, Question, Section, SectionState, UnreadableError

# Nothing is switched on for it: where no administrator has set watches, there is no report.
DCGM_HEALTH = Question("gpu.dcgm_health", 15, "command -v dcgmi >/dev/null || exit 127\ndcgmi health -c -j", "gpu.smi")
# Level 1 looks at software and settings, in seconds, and puts no load on a GPU.
DCGM_DIAG = Question("gpu.dcgm_diag", 40, "command -v dcgmi >/dev/null || exit 127\ndcgmi diag -r 1 -j", "gpu.smi")

_ABSENT = "dcgmi is not installed"
_NO_WATCHES = "health watches not enabled"
_OFF = "watches are off"
_NOT_READ = "run `{}` on the node; does nv-hostengine run (`systemctl status nvidia-dcgm`)?"
_HEALTH = {"Healthy": Verdict.OK, "Warning": Verdict.WARN, "Failure": Verdict.FAIL}
_RESULTS = {"pass": Verdict.OK, "skip": Verdict.SKIP, "warn": Verdict.WARN, "fail": Verdict.FAIL}
# A driver that is set up anew for each program starts slowly, and trains as well as any.
_SLOW_START = "persistence mode"
_LINES = 4


def check_dcgm_health(check: Check, view: GpuView) -> list[Finding]:
    """DCGM's health monitor has nothing to say of GPUs and NVSwitches, where it is installed and watches them."""
    section = view.probe.section(DCGM_HEALTH.name)
    if section.tool_missing:
        return [check.skip(_ABSENT)]
    if _watching(section) == _OFF:
        return [check.skip("DCGM watches nothing here: `dcgmi health -s a` switches it on")]
    body = _table(_document(section, "dcgmi health -c -j"), "body")
    told = str(_table(body, "Overall Health").get("value"))
    if told not in _HEALTH:
        raise _unreadable(section, "dcgmi health -c -j", f"overall health {one_line(told, 40)!r}")
    said = [one_line(text, 200) for name, part in sorted(body.items()) for text in _incidents(name, part)]
    check = check.expecting("Healthy")
    if told == "Healthy" and not said:
        return [check.ok("Healthy, says DCGM")]
    worst = _HEALTH[told] if told != "Healthy" else Verdict.UNKNOWN
    return [check.finding(worst, f"{told}, says DCGM: {'; '.join(said[:_LINES])}", "see gpu.xid, gpu.ecc and gpu.pcie")]


def check_dcgm_diag(check: Check, view: GpuView) -> list[Finding]:
    """DCGM's quick diagnostic (level 1) passes on every GPU, where it is installed."""
    section = view.probe.section(DCGM_DIAG.name)
    if section.tool_missing:
        return [check.skip(_ABSENT)]
    results = list(_results(section))
    check, found = check.expecting("every test passed"), []
    for severity in (Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN):
        for name, device, why in dict.fromkeys(result[1:] for result in results if result[0] is severity):
            text = f"{name}: {why}" if why else name
            remedy = f"see what it says; `dcgmi diag -r 2` on the idle node looks closer{device and f' at {device}'}"
            found.append(check.on(device or "all GPUs").finding(severity, text, remedy))
    if found:
        return found
    passed = {name for severity, name, _, _ in results if severity is Verdict.OK}
    if not passed or not section.ok:
        raise _unreadable(section, "dcgmi diag -r 1 -j", f"{len(passed)} tests passed, exit code {section.exit_code}")
    return [check.ok(f"{len(passed)} tests of DCGM {_version(section)} passed")]


def dcgm_traits(probe: NodeProbe) -> Mapping[str, str | None]:
    """Which DCGM diagnoses a node and whether it watches: what one node is spared, the others are told."""
    return {
        question.name: _known(read, probe.section(question.name))
        for question, read in ((DCGM_DIAG, _version), (DCGM_HEALTH, _watching))
    }


def _known(read: Callable[[Section], str], section: Section) -> str | None:
    try:
        return "not installed" if section.tool_missing else read(section)
    except UnreadableError:
        return None


def _watching(section: Section) -> str:
    if section.state is SectionState.ENDED and _NO_WATCHES in section.output.lower():
        return _OFF
    if not section.ok or not _table(_table(_document(section, "dcgmi health -c -j"), "body"), "Overall Health"):
        raise _unreadable(section, "dcgmi health -c -j", section.trouble() or "no overall health")
    return "watches are on"


def _results(section: Section) -> Iterator[tuple[Verdict, str, str, str]]:
    """(verdict, test, GPUs or nothing, why) of every result. DCGM 3 names GPUs by `gpu_ids`, DCGM 4 by `entity_id`."""
    document = _document(section, "dcgmi diag -r 1 -j")
    root = document.get("DCGM Diagnostic") or _table(document, "DCGM GPU Diagnostic")
    try:
        for category in root["test_categories"]:
            for test in filter(None, category["tests"]):
                for result in test["results"]:
                    yield _result(str(test["name"]), result)
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(section, "dcgmi diag -r 1 -j", one_line(f"{type(error).__name__}: {error}", 80)) from None


def _result(name: str, result: Mapping[str, Any]) -> tuple[Verdict, str, str, str]:
    told = str(result["status"])
    severity = _RESULTS.get(told.lower(), Verdict.UNKNOWN)
    warnings = result.get("warnings", result.get("warning")) or []
    listed = warnings if isinstance(warnings, list) else [warnings]
    words = [one_line(str(one["warning"] if isinstance(one, dict) else one), 200) for one in listed[:_LINES]]
    why = "; ".join(words) or ("" if severity is not Verdict.UNKNOWN else f"status {one_line(told, 40)!r}")
    if severity is Verdict.FAIL and all(_SLOW_START in word.lower() for word in words or [name]):
        severity = Verdict.WARN
    gpus = result.get("gpu_ids", result.get("entity_id"))
    return severity, one_line(name, 60), "" if gpus is None else f"GPU {one_line(str(gpus), 40)}", why


def _incidents(name: str, part: Any) -> Iterator[str]:
    """What the health monitor says below one name, with the way to it: `GPU 0 PCIe system Warning: ...`."""
    if not isinstance(part, dict):
        return
    for text in part.get("overflow") or ():
        yield f"{name} {part.get('value', '')}: {text}"
    for child, below in sorted(_table(part, "children").items()):
        yield from _incidents(name if child == "Errors" else f"{name} {child}", below)


def _version(section: Section) -> str:
    document = _document(section, "dcgmi diag -r 1 -j")
    places = (document, _table(document, "metadata"), _table(document, "DCGM GPU Diagnostic"))
    verdicts = {result[0] for result in _results(section)}
    # It ends with another exit code when a test failed, and only then.
    if not verdicts or not (section.ok or verdicts - {Verdict.OK, Verdict.SKIP}):
        raise _unreadable(section, "dcgmi diag -r 1 -j", section.trouble() or "no test")
    return one_line(next((str(place["version"]) for place in places if "version" in place), "of unknown version"), 40)


def _document(section: Section, command: str) -> dict[str, Any]:
    """The JSON object in the answer; other words may stand before it. Raises UnreadableError."""
    begin = section.output.find("{")
    if section.state is not SectionState.ENDED or begin < 0:
        raise _unreadable(section, command, section.trouble() or "no JSON")
    try:
        document, end = json.JSONDecoder().raw_decode(section.output, begin)
    except (ValueError, RecursionError):
        raise _unreadable(section, command, "no whole JSON") from None
    if section.output[end:].strip():
        raise _unreadable(section, command, "more than one answer")
    return document if isinstance(document, dict) else {}


def _table(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = parent.get(name)
    return found if isinstance(found, dict) else {}


def _unreadable(section: Section, command: str, why: str) -> UnreadableError:
    last = section.output.strip().splitlines()[-1:] or [""]
    return UnreadableError(f"`{command}` cannot be read: {why}", one_line(last[0], 200), _NOT_READ.format(command))
