"""Computes attention over what rows share and over what each row has alone."""
