"""Runs jobs of many prompts: reads them, orders them, runs them in batches, and keeps their completions."""
