"""Training checkpoints: when to save, how to write, how to verify."""
