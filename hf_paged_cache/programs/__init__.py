"""A program of somebody else's on prefix caches, without a changed line: what `hf-paged-cache run` starts."""
