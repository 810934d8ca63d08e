"""Keys and values as tensors, indexed by block id. Knows nothing of tokens, rows or who holds a block."""
