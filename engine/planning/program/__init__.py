"""Plans: tiles and messages of every rank, step by step."""
