"""The space that the all-pairs tests cover: how a model is sharded and trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from helpers.oracle.all_pairs import Pair

FACTORS: Mapping[str, Sequence[Any]] = {
    "dp": (1, 2, 3),
    "tp": (1, 2, 4),
    "sp": (False, True),
    "vocab": (True, False),
    "kv": (4, 2, 1),
    "microbatches": (1, 2, 3),
    "valid": ("all", "uneven", "silent_rank", "silent_microbatch"),
    "gathered": ("save", "regather"),
    "kernels": ("torch", "triton"),
    "logits": ("chunk", "save"),
    "optimizer": ("sgd", "momentum", "adamw", "groups"),
    "recompute": ("none", "full", "every(2, layers)", "selective(attention, silu)"),
    "state": (
        "",
        "bucket = 1KiB",
        "zero 1 over dp",
        "zero 1 over dp  bucket = 1KiB",
        "zero 2 over dp",
        "zero 3 over dp",
        "zero 3 over dp  bucket = 1KiB  prefetch = 0",
        "parameters, optimizer over dp  prefetch = 3",
        'zero 3 over dp  group norms { params = ["norm*"]  zero 1 over dp }',
    ),
    "clip": (0.0, 0.05, 1e3),  # off, always at work, never at work
}
IMPOSSIBLE: frozenset[Pair] = frozenset(
    {
        frozenset({("dp", 3), ("tp", 4)}),  # more than 8 ranks
        frozenset({("dp", 1), ("valid", "silent_rank")}),  # no valid token: a test of its own
        frozenset({("microbatches", 1), ("valid", "silent_microbatch")}),
    }
)
