"""Triton kernels of everything but attention, and what says whether one can be used."""
