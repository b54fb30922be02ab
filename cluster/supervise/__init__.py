"""The node's side of a run: the supervisor that owns its processes, and the agent by which a launcher reaches it."""
