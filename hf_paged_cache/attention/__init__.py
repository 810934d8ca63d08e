"""How attention reads keys and values: a contiguous copy of the running rows, or a gather from the pool for each layer."""
