"""Routing policy: chooses the engines of a request. Pure: no I/O; time is an argument."""
