"""Model folders of Hugging Face: shape from config.json, tokenizer files, names of weights."""
