"""Knows the engines: which there are, which are up, and what they say of themselves."""
