"""Reaching nodes: names, addresses, host keys, SSH connections, many of them at once."""
