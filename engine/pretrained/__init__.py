"""Model folders of Hugging Face: what config.json says, tokenizer files, names of weights."""
