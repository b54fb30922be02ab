"""What dcgmi says, in the forms of DCGM 3 and 4, and what becomes of it; damaged answers: test_damaged_answers.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rehearsal import check, healthy, with_text
from testkit.check_fakes import changed_section, only

from cluster.checks.finding import Finding, Verdict

OK, WARN, FAIL, SKIP, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIP, Verdict.UNKNOWN
DIAG, HEALTH = "gpu.dcgm_diag", "gpu.dcgm_health"
ALL = "0,1,2,3,4,5,6,7"
UNREAD = "dcgmi cannot be read: "
NO_ENGINE = "Error: unable to establish a connection to the specified host: localhost"
PERSISTENCE = 'Persistence mode for GPU 0 is disabled. Enable it by running "nvidia-smi -i <gpuId> -pm 1 " as root.'


def dcgm3(*tests: dict[str, Any] | None) -> str:
    """As DCGM 3 prints it: a warning before the document, empty entries between tests."""
    categories = [{"category": "Deployment", "tests": [one for test in tests for one in (test, None)][:-1]}]
    return (
        f"WARNING: not the same build\n{json.dumps({'DCGM GPU Diagnostic': {'test_categories': categories}}, indent=1)}"
    )


def dcgm4(*results: dict[str, Any]) -> str:
    tests = [{"name": "software", "results": list(results), "test_summary": {"status": "Fail"}}]
    document = {
        "DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": tests}]},
        "entity_groups": [{"entity_group": "GPU", "entities": [{"entity_id": 0, "serial_num": "<<<NOT_SUPPORTED>>>"}]}],
        "metadata": {"Driver Version Detected": "580.82.09", "version": "4.2.3"},
    }
    return json.dumps(document, indent="\t")


def test3(name: str, status: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "results": [{"gpu_ids": ALL, "status": status, **more}]}


test3.__test__ = False  # type: ignore[attr-defined]


def entity(number: int, status: str, *warnings: str) -> dict[str, Any]:
    told = [{"error_category": 8, "error_id": 29, "error_severity": 5, "warning": text} for text in warnings]
    return {"entity_group": "GPU", "entity_id": number, "status": status, **({"warnings": told} if told else {})}


def diagnosed(text: str, code: int = 0) -> list[Finding]:
    probe = changed_section(healthy(), DIAG, output=text, exit_code=code)
    return [finding for finding in check(probe) if finding.check == DIAG]


PASSED = (test3("Denylist", "PASS"), test3("NVML Library", "PASS"), test3("Inforom", "SKIP"))


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        (dcgm3(*PASSED), 0, [(OK, None, "2 tests of DCGM passed")]),
        (dcgm4(entity(0, "Pass"), entity(1, "Pass")), 0, [(OK, None, "1 tests of DCGM passed")]),
        (
            dcgm4(entity(0, "Pass"), entity(1, "Fail", "Row remap failed")),
            226,
            [(FAIL, "GPU 1", "software: Row remap failed")],
        ),
        (dcgm3(*PASSED, test3("PCIe", "Fail", warnings="slow")), 226, [(FAIL, f"GPU {ALL}", "PCIe: slow")]),
        (dcgm3(*PASSED, {"name": "PCIe", "results": [{"status": "Fail"}]}), 226, [(FAIL, "all GPUs", "PCIe")]),
        (dcgm3(*PASSED, test3("PCIe", "WARN")), 0, [(WARN, f"GPU {ALL}", "PCIe")]),
        # Slow to start, which a rank does once.
        (dcgm4(entity(0, "Fail", PERSISTENCE)), 226, [(WARN, "GPU 0", f"software: {PERSISTENCE}")]),
        (dcgm4(entity(0, "Fail", PERSISTENCE, "SRAM")), 226, [(FAIL, "GPU 0", f"software: {PERSISTENCE}; SRAM")]),
        (dcgm3(test3("Persistence Mode", "Fail")), 226, [(WARN, f"GPU {ALL}", "Persistence Mode")]),
        # Not one of these is good news.
        (dcgm3(*PASSED, test3("Inforom", "Not Run")), 0, [(UNKNOWN, f"GPU {ALL}", "Inforom: status 'Not Run'")]),
        (dcgm3(*PASSED), 226, [(UNKNOWN, None, "dcgmi: 2 tests passed, exit code 226")]),
        (dcgm3(PASSED[2]), 0, [(UNKNOWN, None, "dcgmi: 0 tests passed, exit code 0")]),
        (dcgm3(*PASSED) * 2, 0, [(UNKNOWN, None, UNREAD)]),
        ('{"DCGM Diagnostic": {"Error": "no GPU"}}', 1, [(UNKNOWN, None, "dcgmi: no 'test_categories' in the answer")]),
        (NO_ENGINE, 255, [(UNKNOWN, None, f"{UNREAD}gpu.dcgm_diag: exit code 255")]),
        ("sh: dcgmi: not found", 127, [(SKIP, None, "dcgmi is not installed")]),
    ],
)
def test_a_diagnostic_passes_fails_or_is_not_known(
    text: str, code: int, expected: list[tuple[Verdict, str | None, str]]
) -> None:
    found = diagnosed(text, code)
    assert [(one.severity, one.device) for one in found] == [(severity, device) for severity, device, _ in expected]
    assert all(one.observed.startswith(words) for one, (_, _, words) in zip(found, expected, strict=True))
    assert all(finding.remedy for finding in found if finding.severity not in (OK, SKIP))


def report(overall: str, **body: Any) -> str:
    return json.dumps({"body": {"Overall Health": {"value": overall}, **body}, "header": ["Health Monitor Report"]})


REPLAYS = {"value": "Warning", "overflow": ["Detected 12 PCIe replays,", "more than 8 per minute"]}
SICK = {"children": {"3": {"value": "Warning", "children": {"Errors": {"children": {"PCIe system": REPLAYS}}}}}}


@pytest.mark.parametrize(
    ("text", "code", "severity", "observed"),
    [
        (report("Healthy"), 0, OK, "Healthy, says DCGM"),
        (
            report("Warning", GPU=SICK),
            0,
            WARN,
            "Warning, says DCGM; GPU 3 PCIe system: Detected 12 PCIe replays,; "
            "GPU 3 PCIe system: more than 8 per minute",
        ),
        (report("Failure"), 0, FAIL, "Failure, says DCGM"),
        (report("Healthy", GPU=SICK), 0, UNKNOWN, "Healthy, says DCGM; GPU 3"),  # it says two things
        (report("Internal error"), 0, UNKNOWN, "overall health 'Internal error'"),
        (report("Healthy"), 1, UNKNOWN, "exit code 1"),
        ("{}", 0, UNKNOWN, "dcgmi: no 'body' in the answer"),
        ("Error: Health watches not enabled. Please enable watches. ", 255, SKIP, "DCGM watches nothing here"),
        ("Error: Unable to check health watches. Return: Host engine is not running", 255, UNKNOWN, "exit code 255"),
        ("", 127, SKIP, "dcgmi is not installed"),
    ],
)
def test_the_health_monitor_is_believed_as_far_as_it_is_read(
    text: str, code: int, severity: Verdict, observed: str
) -> None:
    found = only(check(changed_section(healthy(), HEALTH, output=text, exit_code=code)), HEALTH)
    assert found.severity is severity
    assert observed in found.observed


@pytest.mark.parametrize(
    ("health", "severity"),
    [
        ("<summary>Healthy</summary><bandwidth>Full</bandwidth><route_unhealthy>False</route_unhealthy>", OK),
        ("<summary>N/A</summary><incorrect_configuration>None</incorrect_configuration>", OK),
        ("<summary>Unhealthy</summary>", FAIL),
        ("<summary>Healthy</summary><bandwidth>Degraded</bandwidth>", FAIL),
        ("<route_unhealthy>True</route_unhealthy>", FAIL),
        ("<route_recovery_in_progress>True</route_recovery_in_progress>", FAIL),
        ("<summary>Unknown Error</summary>", UNKNOWN),
    ],
)
def test_what_the_driver_knows_of_the_nvlink_fabric_counts(health: str, severity: Verdict) -> None:
    probe = with_text(healthy(), "gpu.smi", "</fabric>", f"<health>{health}</health></fabric>")
    assert [one.severity for one in check(probe) if one.check == "gpu.fabric"] == [severity]
