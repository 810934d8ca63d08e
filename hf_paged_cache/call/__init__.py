"""The rows and forwards of one call: what is asked, found, planned, filled, shared, kept and counted."""
