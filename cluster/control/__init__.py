"""The launcher's side of a run: the protocol of launchers, links to nodes, the controller, the verdict at the end."""
