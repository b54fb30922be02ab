"""The code of the ranks on its way to the nodes: one content-addressed folder per version."""
