"""The memory account: what one rank holds of a step, read off the IR.

Purpose: state, what autograd keeps, and the moment when most is in memory, before anything starts.
Non-goals: tables for people (`explain`); what the allocator loses.
"""

# pyright: reportUnusedImport=false

from .account import Account, Bucket, account, accounts, at_loads
from .capacity import SAID, capacity, fits, memory_budget, place, too_large, unknown, why_unknown
from .need_range import VERDICTS, NeedRange, need_range
from .peak import PeakSnapshot
from .saved_activations import Kept
