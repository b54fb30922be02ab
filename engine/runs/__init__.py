"""What a run is on disk. Standard library only."""
