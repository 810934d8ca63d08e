"""The rows of one call: tensors of that call alone, which transformers runs on."""
