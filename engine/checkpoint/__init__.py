"""Checkpoints of the training state: committed by a rename, verified by hash, readable on any number of ranks."""
