"""`burst sweep`: cells planned and checked, each one run exactly once, whatever is killed in between."""
