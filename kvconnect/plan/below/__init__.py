"""The plan of the tiers below host memory: disk, and a remote store that engines share."""

from kvconnect.plan.below.plan import BelowLimits, BelowPlan, Came
from kvconnect.plan.below.search import SHARED, Offer, Verdict, Wanted

__all__ = ["SHARED", "BelowLimits", "BelowPlan", "Came", "Offer", "Verdict", "Wanted"]
