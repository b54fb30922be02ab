"""Kernels: attention/ computes tiles by libraries; the modules here are Triton kernels for all other operations."""
