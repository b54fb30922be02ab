"""Every setting of a run: its schema, the reader, and the errors. Imports nothing else of ours, and no torch."""
