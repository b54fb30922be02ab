"""Requirements of a pyproject.toml, one per line: requirements.py PYPROJECT EXCEPT [EXTRA]...

All dependencies of the project but the one named EXCEPT, then those of each EXTRA.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def main(path: str, excepted: str, *extras: str) -> None:
    """Print them."""
    project = tomllib.loads(Path(path).read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    print("\n".join(line for line in wanted if not re.match(rf"{re.escape(excepted)}\b", line)))


if __name__ == "__main__":
    main(*sys.argv[1:])
