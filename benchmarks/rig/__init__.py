"""A fleet on one machine: every rank in a network namespace of its own, nodes joined by shaped rails."""
