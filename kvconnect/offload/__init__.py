"""Decisions without I/O: events in, instructions out; time is an argument.

No socket, thread, clock or tensor in here, so every race is a unit test.
"""
