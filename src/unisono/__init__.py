"""Data-parallel training with the same weights, bit for bit, on any number of workers."""
