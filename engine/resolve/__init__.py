"""Resolve a checked configuration and facts about its machines into the work of every rank, once. No torch."""
