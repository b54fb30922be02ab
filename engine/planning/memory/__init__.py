"""Whether a step fits: what policies keep and compute again, capacities, and the search for what does."""
