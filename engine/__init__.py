"""The torch engine of burst: long-sequence training of Llama-style language models."""
