"""Errors of GPUs and NVSwitches in a kernel log, as the real probe script reads it from a file, a journal or dmesg."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import check, fixture_text, healthy, program, write_files
from testkit.check_fakes import ask_here, changed_section

from cluster.checks.finding import Verdict
from cluster.survey.facts import NodeFacts
from cluster.survey.kernel_log import KERNEL_LOG
from cluster.survey.section import NodeProbe
from engine.config.cluster import ClusterConfig

OK, WARN, UNKNOWN, FAIL = Verdict.OK, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL


def with_log(folder: Path, text: str) -> NodeProbe:
    root = write_files(folder, "h100x8")
    (root / "var/log/kernel-fabric.log").unlink()
    (root / "var/log/kernel-gpus.log").write_text(text)
    answer = ask_here([KERNEL_LOG], folder, BURST_PROBE_ROOT=str(root)).section(KERNEL_LOG.name)
    return changed_section(healthy(), KERNEL_LOG.name, output=answer.output, exit_code=answer.exit_code)


def errors(probe: NodeProbe) -> list[tuple[str | None, Verdict, str]]:
    return [(one.device, one.severity, one.observed) for one in check(probe) if one.check == "gpu.xid"]


def test_lines_of_a_real_kernel_log_are_understood(tmp_path: Path) -> None:
    assert sorted(errors(with_log(tmp_path, fixture_text("kernel.log")))) == [
        ("0000:0f:00.0", FAIL, "Xid 94, Xid 64"),
        ("0000:85:00.0", WARN, "SXid 12028, non-fatal"),
        ("0000:86:00.0", FAIL, "SXid 22013, fatal"),
        ("GPU 1", WARN, "Xid 13 (2 times)"),
        ("GPU 4", FAIL, "fallen off the bus"),
        ("GPU 5", FAIL, "Xid 154, Xid 999"),
    ]


def test_a_flood_of_one_error_hides_no_other(tmp_path: Path) -> None:
    flood = "[1.0] NVRM: Xid (PCI:0000:1b:00): 13, pid=1, name=a, Graphics Exception\n"
    fatal = "[2.0] NVRM: Xid (PCI:0000:43:00): 79, pid=1, GPU has fallen off the bus.\n"
    noise = "".join(f"[3.0] NVRM: odd Xid {chr(97 + number % 26) * number}\n" for number in range(1, 600))
    probe = with_log(tmp_path, "Linux version 6\n" + flood * 3000 + fatal + noise + flood * 20000)
    assert errors(probe)[:2] == [("GPU 0", WARN, "Xid 13 (23000 times)"), ("GPU 1", FAIL, "Xid 79")]


def test_links_that_are_lost_are_counted_but_for_the_boot(tmp_path: Path) -> None:
    text = "".join(
        f"[{at}.5] mlx5_core 0000:18:00.0 ib0: Link {way}\n"
        for at in (12, 600, 601, 602, 863000, 863001)
        for way in ("down", "up")
    )
    sick = "[7.1] mlx5_core 0000:18:00.0: poll_health:830: device's health compromised - reached miss\n"  # at any time
    timeless = "mlx5_core 0000:18:00.0 ib0: Cable unplugged\n"
    log = NodeFacts(with_log(tmp_path, text + sick + timeless), ClusterConfig()).kernel_log
    assert log.seen == (
        (2, "[602.5] mlx5_core 0000:18:00.0 ib0: Link down"),
        (2, "[863001.5] mlx5_core 0000:18:00.0 ib0: Link down"),  # what came within a day is counted apart
        (1, sick.strip()),
        (1, timeless.strip()),
    )
    assert (log.reader, log.total, log.reaches_boot) == ("cat", 14, False)


@pytest.mark.parametrize(("text", "severity"), [("[900.0] usb 1-1: new device\n", WARN), ("", UNKNOWN)])
def test_a_log_without_its_beginning_and_a_log_without_lines(tmp_path: Path, text: str, severity: Verdict) -> None:
    assert [found[1] for found in errors(with_log(tmp_path, text))] == [severity]


BOOT = "kernel: Linux version 6.1\\n"
XID = "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\\n"


@pytest.mark.parametrize(
    ("journal", "dmesg", "reader"),
    [
        (f"printf '{BOOT}{XID}'", "echo '[9.0] nothing of interest'", "journalctl"),
        # A journal that shows nothing is no clean journal.
        *(
            (said, f"printf '{BOOT}{XID}'", "dmesg")
            for said in (
                "exit 0",
                "echo 'No journal files were opened due to insufficient permissions.'; exit 1",
                "echo '-- No entries --'",
                "echo 'Hint: You are currently not seeing messages from other users.'",
            )
        ),
        ("exit 1", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1", ""),
        ("exit 1", "exit 0", ""),
        ("exit 1", "exit 127", ""),
    ],
)
def test_the_journal_is_read_before_the_buffer_of_the_kernel(
    tmp_path: Path, journal: str, dmesg: str, reader: str
) -> None:
    program(tmp_path, "journalctl", journal)
    program(tmp_path, "dmesg", dmesg)
    probe = changed_section(healthy(), "kernel.log", output="")  # a real node, without a rehearsal tree
    answer = ask_here([KERNEL_LOG], tmp_path, tools=tmp_path / "bin").section("kernel.log")
    probe = changed_section(probe, "kernel.log", output=answer.output, exit_code=answer.exit_code)
    found = next(one for one in check(probe) if one.check == "gpu.xid")
    if reader:
        assert NodeFacts(probe, ClusterConfig()).kernel_log.reader == reader
        assert (found.severity, found.observed) == (FAIL, "Xid 79")
    else:
        assert (found.severity, "not permitted" in found.evidence) == (UNKNOWN, "permitted" in dmesg)
