"""The probe's frame: what a section is, and that nothing that a node prints makes a bad one good."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.check_fakes import ask_here, done, frame

from cluster.checks.selection import GROUPS
from cluster.env.live import LIVE
from cluster.env.plan import FACT_QUESTIONS
from cluster.survey.facts import SECTION_BYTES, build_script, is_complete, new_delimiter, read_sections
from cluster.survey.section import Question, SectionState

FENCE = "@@" + "ab" * 16
SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"]]
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}\.[a-z0-9_]{1,8}", fullmatch=True)


QUESTIONS = (
    Question("t.fine", 5, """echo "a 'quoted' word"; echo aside >&2; printf 'no line end'"""),
    Question("t.fails", 5, "printf 'seen\\n'; exit 3"),
    Question("t.missing", 5, "no_such_tool_anywhere --version"),
    Question("t.hangs", 1, "echo before; sleep 60"),
    Question("t.hangs_again", 1, "echo not asked", after="t.hangs"),
    Question("t.asked", 1, "echo asked", after="t.fails"),
    Question("t.settings", 5, r"""printf '%s|%s|%s' "$BURST_WORD" "${fence:-unset}" "$root" """),
    Question("t.stubborn", 1, "trap '' TERM; while :; do sleep 1; done"),
    Question("t.after", 5, "echo here"),
)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_sections_end_as_their_shells_do(shell: list[str], tmp_path: Path) -> None:
    settings = {"BURST_WORD": "two words; $(id) 'x'\nline"}
    found = ask_here(QUESTIONS, tmp_path, shell=shell, settings=settings).sections
    # Of what is stopped shells say so, each in its own words.
    told = {name: one.output if one.exit_code is not None else one.output[:6] for name, one in found.items()}
    assert {name: (one.state.value, one.exit_code, told[name]) for name, one in found.items()} == {
        "t.fine": ("ended", 0, "a 'quoted' word\naside\nno line end"),
        "t.fails": ("ended", 3, "seen"),
        "t.missing": ("ended", 127, told["t.missing"]),
        "t.hangs": ("timed out", None, "before"),
        "t.asked": ("ended", 0, "asked"),
        "t.settings": ("ended", 0, "two words; $(id) 'x'\nline|unset|"),  # and the fence is nobody's variable
        "t.stubborn": ("timed out", None, told["t.stubborn"]),
        "t.after": ("ended", 0, "here"),
    }
    assert (found["t.missing"].tool_missing, found["t.missing"].ok, found["t.fails"].ok) == (True, False, False)


def test_an_answer_is_complete_although_a_process_left_behind_holds_the_stream() -> None:
    fence = new_delimiter()
    script = build_script([Question("t.leaves", 5, "setsid sleep 3 &")], fence)
    with subprocess.Popen(["sh", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(script)
        process.stdin.close()
        answer = b""
        while not is_complete(answer, fence):
            data = process.stdout.read1()
            assert data, "the stream ended first: nothing was left behind"
            answer += data
    assert read_sections(answer, fence)["t.leaves"].ok


def test_probes_write_no_files(tmp_path: Path) -> None:
    questions = (one for group in GROUPS for one in group.questions)
    ask_here(questions, tmp_path, settings={"BURST_SMI_PAUSE_S": "0"}, TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_python_runs_on_nodes_is_python_3_9() -> None:
    questions = [*(one for group in GROUPS for one in group.questions), *FACT_QUESTIONS, LIVE]
    assert min(question.limit_s for question in questions) > 0  # which would be no limit
    programs = [one.script.partition("<<'PYTHON'")[2] for one in questions]
    for program in filter(None, programs):
        body = program.partition("\n")[2].partition("\nPYTHON\n")[0]
        imports = [one for one in ast.walk(ast.parse(body, feature_version=(3, 9))) if isinstance(one, ast.Import)]
        assert {alias.name for one in imports for alias in one.names} <= sys.stdlib_module_names


@pytest.mark.parametrize("name", ["lower", "A B", "A;id", "", "1A"])
def test_settings_are_names_of_variables(name: str) -> None:
    with pytest.raises(ValueError, match="not a variable"):
        build_script([], FENCE, {name: "x"})


# What an answer is believed.

LINES = st.lists(st.text(alphabet=st.characters(blacklist_categories=["C"]), max_size=20), max_size=4)


@given(st.dictionaries(NAMES, st.tuples(LINES, st.integers(0, 123)), max_size=6))
def test_honest_answers_come_back(told: dict[str, tuple[list[str], int]]) -> None:
    answer = b"noise of a login\n" + b"".join(frame(FENCE, n, "\n".join(t), code) for n, (t, code) in told.items())
    found = read_sections(answer + done(FENCE), FENCE)
    assert list(found) == list(told)
    for name, (_, code) in told.items():
        assert (found[name].exit_code, found[name].state) == (code, SectionState.ENDED)


@given(st.dictionaries(NAMES, LINES, min_size=1, max_size=4), st.integers(0, 2**16))
def test_an_answer_cut_anywhere_never_shows_a_half_section_as_ended(told: dict[str, list[str]], cut: int) -> None:
    whole = b"".join(frame(FENCE, name, "\n".join(lines)) for name, lines in told.items()) + done(FENCE)
    full, part = read_sections(whole, FENCE), read_sections(whole[: cut % (len(whole) + 1)], FENCE)
    for name, section in part.items():
        assert section.state is SectionState.CUT_OFF or section.output == full[name].output


FORGED = st.sampled_from(["end t.bad 0", "begin t.bad", "begin t.other", "end t.other 0", "done", "x"])


@given(st.lists(FORGED, min_size=1, max_size=4), st.integers(1, 255))
def test_lines_put_in_with_the_right_fence_never_make_a_failed_section_good(lines: list[str], code: int) -> None:
    """Whoever knows the fence and prints inside a section gains nothing: what follows contradicts it."""
    forged = "\n".join(f"{FENCE} {line}" for line in lines)
    answer = frame(FENCE, "t.bad", forged, code) + frame(FENCE, "t.last", "fine") + done(FENCE)
    found = read_sections(answer, FENCE)
    assert not found["t.bad"].ok


@given(st.text(max_size=50), st.sampled_from(["begin", "end"]))
def test_words_of_strangers_without_the_fence_are_output(text: str, word: str) -> None:
    line = f"{new_delimiter()} {word} t.one 0 {text}".replace("\n", " ").replace("\r", " ")
    found = read_sections(frame(FENCE, "t.one", line, 4), FENCE)
    assert found["t.one"].exit_code == 4
    assert list(found) == ["t.one"]


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (frame(FENCE, "t.one", "bad", 1) + frame(FENCE, "t.one", "good"), SectionState.CUT_OFF),  # told twice
        (f"\n{FENCE} end t.one 0\n".encode(), SectionState.CUT_OFF),  # an end without a beginning
        *((frame(FENCE, "t.one", "", code), SectionState.TIMED_OUT) for code in (124, 137, 143)),
        (frame(FENCE, "t.one", "x" * SECTION_BYTES), SectionState.CUT_OFF),
        (frame(FENCE, "t.one", "x" * (SECTION_BYTES - 10)), SectionState.ENDED),
    ],
    ids=range(7),
)
def test_a_section_has_ended_when_it_says_so_once_and_in_time(answer: bytes, state: SectionState) -> None:
    section = read_sections(answer, FENCE)["t.one"]
    assert (section.state, section.ok) == (state, state is SectionState.ENDED)
    assert (section.exit_code is None) == (not section.ok)


@given(st.binary(max_size=300))
def test_any_bytes_can_be_read(raw: bytes) -> None:
    word = FENCE.encode()
    for answer in (raw, word + b" begin t.x " + raw, frame(FENCE, "t.x") + raw, b"\n" + word + b" " + raw):
        for section in read_sections(answer, FENCE).values():
            assert "\x1b" not in section.output
            assert "\x00" not in section.output
