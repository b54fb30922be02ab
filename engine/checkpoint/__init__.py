"""Checkpoints of the training state: committed by one rename, verified by hash, readable on any number of ranks."""
