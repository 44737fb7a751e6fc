"""The hand-off protocol without I/O: bytes in, events out."""
