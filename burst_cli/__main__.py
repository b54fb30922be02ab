"""`python -m burst_cli` is `burst`."""

import sys

from burst_cli.app import main

sys.exit(main())
