"""Runs on nodes: Python 3.6, standard library only."""
