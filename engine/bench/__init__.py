"""Measurements of attention and of this machine: what `burst bench` starts on every rank.

Rules: variants take turns in every round, so that a machine's drift meets all of them alike; a barrier stands before
every call and the slowest rank's time counts; medians are given with the fastest and the slowest repeat; ratios are
taken within one cell (one mask, one length) only. `spec` and `ranks` need neither torch nor numpy.
"""
