"""The container image: built once, brought to every node over SSH without a registry, known by its identity."""
