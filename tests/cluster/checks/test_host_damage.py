"""Whatever happens to a section, no check that rests on it stays OK."""

from __future__ import annotations

import pytest
from host_sections import BARE, BARE_SOFTWARE, DOCKER, HEALTHY, damaged, healthy
from hypothesis import given
from hypothesis import strategies as st

from cluster.checks.finding import Verdict
from cluster.checks.host import GROUP, PARTS
from cluster.probe.section import NodeProbe, Section, SectionState

RESTS_ON = {part.section: set(part.checks) for part in PARTS}
BROKEN_STATES = (SectionState.TIMED_OUT, SectionState.CUT_OFF, SectionState.MISSING)


def ok_checks(probe: NodeProbe, section: str) -> set[str]:
    """Checks of a section that are OK all the same."""
    found = GROUP.check(probe, DOCKER)
    return {finding.check for finding in found if finding.check in RESTS_ON[section] and finding.severity is Verdict.OK}


def test_every_section_of_the_script_has_checks_and_is_in_the_fixture() -> None:
    assert set(RESTS_ON) == set(HEALTHY)


@pytest.mark.parametrize("state", BROKEN_STATES)
@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_section_that_did_not_end_makes_nothing_ok(name: str, state: SectionState) -> None:
    probe = damaged(Section(name, HEALTHY[name], None, state))
    assert ok_checks(healthy(), name)
    assert not ok_checks(probe, name)
    assert {finding.check for finding in GROUP.check(probe, DOCKER)} >= RESTS_ON[name]


@pytest.mark.parametrize("code", [1, 2, 125, 126, 127])
@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_section_that_failed_makes_nothing_ok(name: str, code: int) -> None:
    assert not ok_checks(damaged(Section(name, HEALTHY[name], code, SectionState.ENDED)), name)


@pytest.mark.parametrize("text", ["", "sh: not found", "\n\n", "cores\nkernel\nmemlock\nroot", "x" * 5000])
@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_section_with_other_words_makes_nothing_ok(name: str, text: str) -> None:
    assert not ok_checks(damaged(Section(name, text, 0, SectionState.ENDED)), name)


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_no_broken_section_gives_a_trait(name: str) -> None:
    whole, broken = GROUP.traits(healthy()), GROUP.traits(damaged(Section(name)))
    lost = set(whole) - set(broken)
    assert all(broken[check] == whole[check] for check in broken)
    assert lost == {check for check in whole if check in RESTS_ON[name] or (check, name) == ("host.cores", "host.cpu")}


@given(name=st.sampled_from(sorted(HEALTHY)), text=st.text(max_size=300), before=st.booleans())
def test_no_output_whatever_breaks_the_checks(name: str, text: str, before: bool) -> None:
    output = text + HEALTHY[name] if before else HEALTHY[name][: len(text)] + text
    probe = damaged(Section(name, output, 0, SectionState.ENDED))
    for config in (DOCKER, BARE):
        assert {finding.check for finding in GROUP.check(probe, config)} >= RESTS_ON[name]
    GROUP.traits(probe)


@given(cut=st.integers(0, len(BARE_SOFTWARE)))
def test_a_list_of_packages_that_was_cut_tells_no_version(cut: int) -> None:
    text = BARE_SOFTWARE[:cut]
    found = GROUP.check(healthy(software=text), BARE)
    severities = {finding.severity for finding in found if finding.check == "host.torch"}
    assert severities == ({Verdict.OK} if "packages read" in text else {Verdict.UNKNOWN})
