"""Metrics, dashboards, traces, ``kvconnect top`` and ``kvconnect report``."""
