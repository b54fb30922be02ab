"""Runs on nodes: Python 3.9, standard library only."""
