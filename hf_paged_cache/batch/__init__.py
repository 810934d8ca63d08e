"""A job of many prompts: in which order they run, and where their completions are kept. No torch, no model."""
