"""Layouts (which positions each rank holds) and masks (which query attends to which key)."""
