"""What is trained on: the order of samples, the global batch and its micro-batches, and their loading."""
