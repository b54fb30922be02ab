"""Comparison with public implementations of sequence-parallel attention, their own code run over gloo on CPUs."""
