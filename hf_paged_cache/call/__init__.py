"""Holds the steps of one call on rows: what is asked, found, planned, filled, shared, kept and counted."""
