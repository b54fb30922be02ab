"""What is kept for the backward pass and where, what a step needs, and what fits."""
