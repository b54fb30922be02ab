"""Distributed attention as data: masks, layouts, plans, one executor for every method."""
