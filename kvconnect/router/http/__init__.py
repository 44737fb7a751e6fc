"""Client requests over HTTP: admission, attempts, calls of engines, replies."""
