"""Triton kernels for GPUs, where torch's own operations would move an activation more often than needed.

Each has a plain torch version beside its caller, which CPUs run. `dispatch` and `tiles` do without Triton; the other
modules are imported by those to whom `dispatch.uses_triton` said yes.
"""
