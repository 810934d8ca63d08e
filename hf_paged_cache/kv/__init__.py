"""Owns keys and values as tensors, indexed by block id. Knows nothing of who holds a block."""
