"""Is this still the model that computed those blocks, and can we hold its cache? Weights, adapters, rope, support, trials."""
