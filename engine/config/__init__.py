"""Every setting of a run: its schema, the rules between settings, the reader, and the errors. Standard library only."""
