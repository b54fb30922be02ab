"""`burst data` and its progress."""
