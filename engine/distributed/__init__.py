"""Ranks: the mesh of their groups, collectives over them, how long they wait for each other."""
