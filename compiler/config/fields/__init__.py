"""What a field of a class of `settings` can be, and how its values are written.

Purpose: each kind of value with its reading, its range and its showing in one place.
Non-goals: whole sections (`schema`), and any particular setting (`settings`).
"""

from .choices import Selection, choice, selection, text, texts, token, word
from .errors import spelled, unfit
from .field import Field, Part, Settings, Value, call, fields_of, first, heading, heading_of, only, section, sections
from .numbers import FRACTION, NOT_NEGATIVE, POSITIVE, SOME, Size, count, count_or_size, counts, pair, real, share, size

__all__ = [
    "FRACTION",
    "NOT_NEGATIVE",
    "POSITIVE",
    "SOME",
    "Field",
    "Part",
    "Selection",
    "Settings",
    "Size",
    "Value",
    "call",
    "choice",
    "count",
    "count_or_size",
    "counts",
    "fields_of",
    "first",
    "heading",
    "heading_of",
    "only",
    "pair",
    "real",
    "section",
    "sections",
    "selection",
    "share",
    "size",
    "spelled",
    "text",
    "texts",
    "token",
    "unfit",
    "word",
]
