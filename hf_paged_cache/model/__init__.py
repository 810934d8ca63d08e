"""Whether a model is supported, and whether it is still the one that computed the cached blocks."""
