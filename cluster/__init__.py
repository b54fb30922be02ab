"""Machines and processes: plans of launches as plain values, and the one executor that runs them."""
