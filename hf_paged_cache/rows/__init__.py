"""Holds the rows of one call: tensors of that call alone, on which transformers runs the model."""
