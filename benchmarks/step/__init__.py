"""One training step on one process, by this engine and by transformers."""
