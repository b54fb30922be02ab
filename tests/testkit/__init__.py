"""What tests share: waiting, clocks, ranks, rigs and stand-ins."""

import os
from pathlib import Path

KIT = Path(__file__).resolve().parent
ROOT = KIT.parent.parent
# For programs that tests start: the product, this package, and by their names fake_rank and others.
PYTHON_PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", KIT)))
# The same, and a torchrun that starts fake ranks at once in the place of torch.
FAKE_PYTHON_PATH = os.pathsep.join((str(KIT / "fakes"), PYTHON_PATH))


def in_ci() -> bool:
    """Whether CI is set in the environment: what must hold on the project's own machines is then a failure."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def write_program(path: Path, body: str, interpreter: str = "/bin/sh") -> Path:
    """A program, by default a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n{body}\n")
    path.chmod(0o755)
    return path
