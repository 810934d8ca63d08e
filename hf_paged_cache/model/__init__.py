"""Decides whether a model is supported, and whether it is still the model that computed the cached blocks."""
