"""Keeps the contents of evicted blocks in host memory and in files, and gives them back.

A content is found by its block's hash. This folder knows no pool and no allocator.
"""
