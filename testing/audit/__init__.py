"""Mutation testing of the proof: `scalec verify --audit` makes every mistake of a list and
counts what is caught.
"""

from .evaluate import Audit, Bench, Fate, Verdict, audit

__all__ = ["Audit", "Bench", "Fate", "Verdict", "audit"]
