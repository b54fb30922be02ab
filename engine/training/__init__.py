"""Steps, and what surrounds them."""
