"""Fake hardware of testbed nodes: the files that tools and the probe read on a machine with GPUs and InfiniBand."""
