"""How a run comes to its nodes: the runner protocol, and one file per launcher."""
