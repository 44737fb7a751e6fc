"""Chooses the engines of a request. No I/O; time is an argument."""
