"""Measurements of attention and of this machine: the programs that `burst bench` starts on every rank.

Rules: rounds interleave the variants, so that drift of the machine affects all of them equally; a barrier precedes
every call, and the time of the slowest rank counts; medians are reported with the fastest and the slowest repeat;
ratios are computed within one cell (one mask, one length) only. `spec` and `ranks` need neither torch nor numpy.
"""
