"""The node's side of a run: the supervisor that owns its processes, and the bridge by which a launcher reaches it."""
