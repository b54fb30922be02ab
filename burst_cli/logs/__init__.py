"""What the ranks of a run say, and what started them says, read in bounded memory whatever the logs hold."""
