"""What a user asks of a cache, a folder or a model besides to run `generate`: a module each, bound to `PagedPrefixCache` by its name."""
