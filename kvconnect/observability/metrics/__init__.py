"""Metrics: ``catalog`` has one row per metric, ``model`` its columns, ``prometheus`` publishes it.

Nothing is imported here, so that reading the catalogue does not need ``prometheus_client``.
"""
