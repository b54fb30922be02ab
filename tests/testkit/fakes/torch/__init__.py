"""Stands in the place of torch for fake ranks: it starts at once, and has what they need of it."""

from types import SimpleNamespace

# Nothing of a device was ever used.
cuda = SimpleNamespace(is_initialized=lambda: False)


class OutOfMemoryError(RuntimeError):
    """What an allocation on a device raises."""
