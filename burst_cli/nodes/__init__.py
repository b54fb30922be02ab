"""Machines: `burst check-nodes`, `burst env`, `burst hosts` and `burst testbed`."""
