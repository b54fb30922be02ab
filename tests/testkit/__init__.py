"""What tests share: waiting, clocks, ranks, rigs and stand-ins.

KIT goes on the PYTHONPATH of what tests start with `python -m NAME`: fake_trainer, supervise_rank, hang_programs.
"""

from pathlib import Path

KIT = Path(__file__).resolve().parent
ROOT = KIT.parent.parent
