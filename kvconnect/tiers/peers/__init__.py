"""Blocks in the host memory of other engines: read from there, and served to them."""
