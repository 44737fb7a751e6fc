"""The secondary tiers: a local disk, and a store that several engines share."""

from kvconnect.tiers.lookup import SHARED, LookupRequest, LookupResult, PrefetchDecision
from kvconnect.tiers.planner import Promoted, TierLimits, TierPlan

__all__ = [
    "SHARED",
    "LookupRequest",
    "LookupResult",
    "PrefetchDecision",
    "Promoted",
    "TierLimits",
    "TierPlan",
]
