"""`burst image`: built here, brought to the nodes."""
