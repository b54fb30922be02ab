"""What could not be seen never passes: a healthy answer, damaged in every way, has no OK left where it mattered."""

from __future__ import annotations

import re

import pytest
from gpu_rehearsal import bad, check, ended, healthy, only, with_section, with_text

from cluster.checks.finding import Verdict
from cluster.checks.gpu import GROUP
from cluster.probe.section import NodeProbe
from engine.config_cluster import ClusterConfig


def passed(probe: NodeProbe) -> set[str]:
    """Checks that say OK."""
    return {found.check for found in check(probe) if found.severity is Verdict.OK}


def test_a_node_that_answered_nothing_passes_nothing() -> None:
    probe = NodeProbe("node1")
    assert passed(probe) == set()
    assert GROUP.traits(probe, ClusterConfig()) == {}


def test_no_expected_gpus_and_no_sign_of_any_is_skipped() -> None:
    probe = NodeProbe(
        "node1",
        {"gpu.lspci": ended("pci_devices\t30\tend", name="gpu.lspci"), "gpu.smi": ended("", 127)},
    )
    for expected in (None, 0):
        assert [found.severity for found in check(probe, gpus=expected)] == [Verdict.SKIP]
    assert GROUP.traits(probe, ClusterConfig()) == {"gpu.count": "0"}


@pytest.mark.parametrize(
    ("devices", "said", "code", "expected"),
    [
        ("pci_devices\t30\tend", "", 127, 8),  # GPUs are expected
        ("pci_devices\t30", "", 127, None),  # the list of devices breaks off
        ("pci_devices\t0\tend", "No devices were found", 6, None),  # no PCI bus to look at, but a driver's tool
        ("pci_devices\t30\tend", "No devices were found", 6, None),  # a driver that has lost its devices
        ("pci_devices\t30\tend", "Failed to initialize NVML: Unknown Error", 255, None),
    ],
)
def test_a_node_that_may_have_gpus_is_not_skipped(devices: str, said: str, code: int, expected: int | None) -> None:
    probe = NodeProbe("node1", {"gpu.lspci": ended(devices, name="gpu.lspci"), "gpu.smi": ended(said, code)})
    findings = check(probe, gpus=expected)
    assert ("gpu.nvidia_smi", None, Verdict.FAIL) in bad(findings)
    assert not {found for found in findings if found.severity is Verdict.OK}


def test_gpus_that_fell_off_the_bus_are_remembered_by_the_kernel() -> None:
    """The PCI bus lists none any more, and no tool is there to ask."""
    line = "[9.0] NVRM: Xid (PCI:0000:52:00): 79, pid=9, name=python3, GPU has fallen off the bus."
    probe = NodeProbe(
        "node1",
        {
            "gpu.lspci": ended("pci_devices\t30\tend", name="gpu.lspci"),
            "gpu.smi": ended("", 127),
            "gpu.kernel": ended(f"seen\t1\t{line}\nlog\tdmesg\t9\tsince boot", name="gpu.kernel"),
        },
    )
    assert ("gpu.xid", Verdict.FAIL) in {(found.check, found.severity) for found in check(probe)}


# False passes that are known from other tools, one test each.


def test_regression_a_field_that_never_exists_is_not_no_throttling() -> None:
    """The mask was renamed at driver 535: who asks for the old name only sees nothing, and that is not health."""
    text = healthy().section("gpu.smi").output
    probe = with_section(healthy(), "gpu.smi", output=text.replace("clocks_event_reason", "clocks_new_name"))
    assert only(check(probe), "gpu.throttle").severity is Verdict.UNKNOWN


def test_regression_counting_kinds_of_one_gpu_does_not_make_a_node_uniform() -> None:
    """A count of different values that is taken over one line is always 1."""
    probe = with_text(healthy(), "gpu.smi", "<product_name>NVIDIA H100 80GB HBM3<", "<product_name>NVIDIA A100<")
    assert ("gpu.model", "GPU 0", Verdict.FAIL) in bad(check(probe))
    assert "," in GROUP.traits(probe, ClusterConfig())["gpu.model"]


def test_regression_a_tool_that_failed_with_healthy_words_is_not_healthy() -> None:
    """`tool | grep inactive` finds nothing, too, when the tool died."""
    for section, name in (("gpu.nvlink", "gpu.nvlink"), ("gpu.kernel", "gpu.xid"), ("gpu.smi", "gpu.ecc")):
        assert only(check(with_section(healthy(), section, exit_code=1)), name).severity is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("dmesg: read kernel buffer failed: Operation not permitted", 1),
        ("", 0),
        ("log\tdmesg\t0\tcut", 0),
    ],
)
def test_regression_no_kernel_log_is_no_pass(output: str, code: int) -> None:
    findings = check(with_section(healthy(), "gpu.kernel", output=output, exit_code=code))
    assert bad(findings) == {("gpu.xid", None, Verdict.UNKNOWN), ("gpu.sxid", None, Verdict.UNKNOWN)}
    assert "kernel log" in only(findings, "gpu.xid").remedy


def test_regression_fewer_gpus_that_are_all_fine_are_not_fine() -> None:
    """nvidia-smi lists seven healthy GPUs of eight: every count of bad ones is 0."""
    text = healthy().section("gpu.smi").output
    start, end = text.index("\t<gpu id="), text.index("</gpu>") + len("</gpu>\n")
    probe = with_section(healthy(), "gpu.smi", output=(text[:start] + text[end:]).replace(">8</att", ">7</att"))
    assert ("gpu.count", None, Verdict.FAIL) in bad(check(probe))


def test_regression_any_one_good_link_does_not_pass_for_all() -> None:
    text = healthy().section("gpu.nvlink").output
    head, _, tail = text.partition("GPU 1:")
    dead = "".join(f"\t Link {link}: <inactive>\n" for link in range(18))
    title, _, rest = tail.partition("\n")
    probe = with_section(
        healthy(), "gpu.nvlink", output=f"{head}GPU 1:{title}\n{dead}GPU 2:{rest.partition('GPU 2:')[2]}"
    )
    assert ("gpu.nvlink", "GPU 1", Verdict.FAIL) in bad(check(probe))


def test_regression_a_literal_na_of_remapped_rows_is_no_failure_and_no_pass() -> None:
    text = re.sub(
        r"<remapped_rows>.*?</remapped_rows>",
        "<remapped_rows>N/A</remapped_rows>",
        healthy().section("gpu.smi").output,
        flags=re.DOTALL,
    )
    assert only(check(with_section(healthy(), "gpu.smi", output=text)), "gpu.row_remap").severity is Verdict.SKIP
