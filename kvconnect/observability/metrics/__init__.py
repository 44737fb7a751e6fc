"""Metrics: ``catalog`` has one row per metric, ``model`` the columns, ``prometheus`` publishes.

This module imports nothing, so the catalogue is usable without ``prometheus_client``.
"""
