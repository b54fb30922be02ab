"""`burst eval`: from a run to the launch that evaluates its weights."""
