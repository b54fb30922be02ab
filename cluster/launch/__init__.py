"""How a run gets to its nodes: one file or folder per launcher, each a `Runner` (cluster.control.runner)."""
