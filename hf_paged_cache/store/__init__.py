"""Holds what outlives calls: the blocks of one model, its pins, and the memory that they may take."""
