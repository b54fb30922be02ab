"""Configuration files, overrides, where a value comes from, and `burst config`."""
