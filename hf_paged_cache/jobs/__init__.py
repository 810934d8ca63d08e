"""A job of many prompts: how they are read, in which order and where they run, and where their completions are kept."""
