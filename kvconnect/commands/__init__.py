"""The subcommands of ``kvconnect``, one module each.

Modules that need an extra are imported when the command runs.
"""
