"""Holds what a user asks of a cache, a folder or a model besides `generate`: a module each, methods of the cache."""
