"""Starting runs: `burst launch`, `burst resume`, their next attempts and what goes on in the background."""
