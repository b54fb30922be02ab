"""Replay of attention plans against a model of a machine: predicted times without running anything."""
