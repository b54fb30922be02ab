"""What nodes print, as values: pure functions from text to frozen dataclasses."""
