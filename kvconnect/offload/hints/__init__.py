"""Hints of requests on their cached blocks: what they do in the host tier, and what came of it.

:class:`~kvconnect.offload.hints.plan.HintPlan` owns all hints of an engine. Secondary tiers remove
and write blocks for it (:mod:`kvconnect.tiers.removals`, :mod:`kvconnect.tiers.writeback`).
"""
