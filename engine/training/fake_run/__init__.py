"""A training step on tensors without values, as one rank of a world that need not exist: it predicts peak memory."""
