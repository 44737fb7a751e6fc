"""Runs the plan's instructions in a worker process and answers with reports."""
