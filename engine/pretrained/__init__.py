"""Models of Hugging Face in and out: what config.json says, weights read a slice at a time, folders written."""
