"""Runs as people see them: which one is meant, how it is, how it goes on, how it ends."""
