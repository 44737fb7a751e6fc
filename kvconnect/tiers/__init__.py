"""The plan of the tiers below host memory: disk, and a remote store that engines share."""

from kvconnect.tiers.lookup import SHARED, Offer, Verdict, Wanted
from kvconnect.tiers.planner import BelowLimits, BelowPlan, Came

__all__ = ["SHARED", "BelowLimits", "BelowPlan", "Came", "Offer", "Verdict", "Wanted"]
