"""KV blocks: byte layout, keys and record formats."""
