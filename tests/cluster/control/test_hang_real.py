"""A training run that hangs for real: the trainer under torchrun, asked for its stacks as a supervisor asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hang_rig import gather_evidence, hanging_run, wait_until_quiet

from cluster.control.hang_blame import find_culprit

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(("fault", "words"), [("hang_sleep", "has not entered"), ("hang_gil", "holds its interpreter")])
def test_the_rank_that_holds_up_a_training_run_is_named(tmp_path: Path, fault: str, words: str) -> None:
    with hanging_run(tmp_path, f"{fault};1;3", ranks=2) as run:
        wait_until_quiet(run, 2, first_step=3)
        found = find_culprit(gather_evidence(run, 2))
    assert found is not None
    assert (found.ranks, found.certain) == ((1,), True)
    assert words in found.reason
    assert any("engine/training/rank/faults.py" in line for line in found.lines)
