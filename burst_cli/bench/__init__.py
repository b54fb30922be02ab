"""`burst bench`: measurements as tables and pictures."""
