"""How attention reads keys and values: from a contiguous copy of the running rows, or by a gather for each layer."""
