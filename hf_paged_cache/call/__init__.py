"""Holds the steps of one call on rows: what is found, planned, filled, shared, kept and counted."""
