"""Runs and sweeps on disk as people see them: which one is meant, its state, its figures, how it ended."""
