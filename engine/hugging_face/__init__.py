"""Decoders of transformers in the trainer: built by its code, run by layers with our attention and LM head."""
