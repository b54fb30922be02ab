"""The run folder and its files. Standard library only."""
