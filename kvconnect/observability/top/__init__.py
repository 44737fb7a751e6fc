"""``kvconnect top``: what some ``/metrics`` endpoints say right now, on a terminal or as JSON."""
