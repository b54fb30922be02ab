"""docs/faults.md from the rows that a run of tests/cluster/launch/test_fault_table.py left:

BURST_FAULT_ROWS=/tmp/rows python -m pytest tests/cluster/launch/test_fault_table.py
python scripts/fault_table.py /tmp/rows
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "docs" / "faults.md"
HEAD = """\
# Faults, and what a run does about them

Every row is a launch of two ranks on two nodes of the virtual cluster (real sshd, torchrun and gloo) that was injured
on purpose, as the tests found it. *Stopped* is the time from the fault until the launch had ended and no process of the
run was left on any node; a refused launch shows how long it took to say so. No row left a process, a container or a
lock behind; a test fails if one does. Made by `python scripts/fault_table.py` from runs of
`tests/cluster/launch/test_fault_table.py`.
"""


def main() -> int:
    """Writes the table; 1 when there are no rows."""
    rows = [json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("*.json"))]
    if not rows:
        print(f"no rows in {sys.argv[1]}", file=sys.stderr)
        return 1
    TARGET.write_text(HEAD + "".join(section(rows, when) for when in ("launching", "running")))
    print(f"{len(rows)} rows in {TARGET}")
    return 0


def section(rows: list[dict[str, Any]], when: str) -> str:
    """The faults of one time."""
    title = {"launching": "While it is launched", "running": "While it runs"}[when]
    lines = [f"\n## {title}\n", "| fault | run.json | blamed | exit code | stopped |", "|---|---|---|---|---|"]
    lines += [line(row) for row in rows if row["when"] == when]
    return "\n".join(lines) + "\n"


def line(row: dict[str, Any]) -> str:
    """One fault."""
    assert not row["left"], row
    stopped = "–" if row["stop_s"] is None else f"{row['stop_s']:.1f} s"
    code = "–" if row["exit_code"] is None else row["exit_code"]
    cells = (row["fault"], row["state"], row["blamed"], code, stopped)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
