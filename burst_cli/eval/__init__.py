"""`burst eval`, and how an evaluation is shown."""
