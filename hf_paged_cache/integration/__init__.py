"""Connects transformers to a call: hooks, arguments, layers, and the forwards that we run ourselves."""
