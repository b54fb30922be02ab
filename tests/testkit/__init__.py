"""What tests share: waiting, clocks, ranks, rigs and stand-ins."""

import os
from pathlib import Path

KIT = Path(__file__).resolve().parent
ROOT = KIT.parent.parent
# For programs that tests start: the product, this package, and by their names fake_trainer, supervise_rank and others.
PYTHON_PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", KIT)))
