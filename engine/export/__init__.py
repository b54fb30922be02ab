"""Trained weights as files that other libraries load. No torch."""
