"""Describes KV blocks: where their bytes lie, their keys, and their formats."""
