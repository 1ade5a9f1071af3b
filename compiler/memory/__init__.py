"""The memory account: what one rank holds of a step, read off the IR.

Purpose: state, what autograd keeps, and the moment when most is in memory, before anything starts.
Non-goals: tables for people (`explain`); what CUDA, the allocator and communication libraries take besides.
"""

from .account import Account, Bucket, account, accounts
from .capacity import capacity, place, too_large
from .kept import Kept
from .room import room
from .walk import Moment

__all__ = [
    "Account",
    "Bucket",
    "Kept",
    "Moment",
    "account",
    "accounts",
    "capacity",
    "place",
    "room",
    "too_large",
]
