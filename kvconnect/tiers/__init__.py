"""The plan of the tiers below host memory: disk, and a remote store that engines share."""

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
