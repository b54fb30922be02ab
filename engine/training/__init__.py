"""Training: steps, batches, validation, metrics, checkpoints, and the rank's process."""
