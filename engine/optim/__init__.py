"""The optimizer: AdamW, moments on the host, and when weights are updated."""
