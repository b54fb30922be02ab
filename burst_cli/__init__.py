"""The command line of burst: parse, call, show."""

__version__ = "0.1.0"
