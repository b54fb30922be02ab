"""Attention methods: presets, their legal settings, and which rows and layers a method has."""
