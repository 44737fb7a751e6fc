"""Metrics: :mod:`~kvconnect.metrics.catalog` says what there is, one row per metric, in the terms
of :mod:`~kvconnect.metrics.model`; :mod:`~kvconnect.metrics.prometheus` publishes it. Nothing is
imported here, so that reading the catalogue does not need ``prometheus_client``.
"""
