"""Buckets: a program's groups of parameters, and the parameters that each has, layer by layer or
stage by stage.

Non-goals: no choice of what goes together (the plan's), where parameters lie (`layout`), memory
(`bucket_memory`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, groupby
from typing import TypeVar

import torch

from .optimizers import ParamGroup
from .parameters import Spec

_Key = TypeVar("_Key")
LayerIndex = tuple[str, ...]
"""A layer of nested repeats, outermost first: the text that the `*` of patterns matches."""

Holders = Mapping[str, tuple[int, ...]]
"""The stages of this rank that have each parameter of a pipeline, by name."""


class Bucket:
    """Groups of parameters of one placement; each rank along `shard_axes` has a shard of them.

    With `per_layer`, each iteration of the repeats that the patterns' `*` run over is moved by
    itself; in a pipeline each stage is.  Its gradient is reduced over `shard_axes` and
    `reduce_axes`, as `reduce_dtype` if given.  With `shard_gradients` a rank keeps only its part of
    gradients, with `reshard_after_forward` only its part of weights, and the whole of a layer while
    it works on the layer.  Weights are gathered `prefetch` layers ahead.

    Each rank along the axis `stages` has the parameters of its own stages alone, which may be none:
    the parameters of each stage are a chunk, moved by itself.  Parameters that several ranks use
    are on all ranks `among` alike, as one chunk.
    """

    def __init__(
        self,
        *groups: ParamGroup,
        per_layer: bool = False,
        shard_axes: tuple[str, ...] = (),
        reduce_axes: tuple[str, ...] = (),
        reduce_dtype: torch.dtype | None = None,
        shard_gradients: bool = False,
        reshard_after_forward: bool = False,
        prefetch: int = 1,
        stages: str = "",
        among: tuple[int, ...] = (),
    ) -> None:
        assert per_layer or stages or not (shard_gradients or reshard_after_forward), (
            "bucket: as a whole it is not shared out while it is used"
        )
        self.groups, self.per_layer, self.prefetch = groups, per_layer, prefetch
        self.shard_axes, self.reduce_axes, self.reduce_dtype = shard_axes, reduce_axes, reduce_dtype
        self.shard_gradients, self.reshard_after_forward = shard_gradients, reshard_after_forward
        self.stages, self.among = stages, among

    @property
    def moves(self) -> bool:
        """Whether it is moved in parts: layer by layer, or chunk by chunk."""
        return self.per_layer or bool(self.stages)

    @property
    def modules(self) -> str:
        """The repeats that the patterns' `*` run over, `layers` or `blocks.layers`."""
        before, _, _ = self.groups[0].patterns[0][0].rpartition(".*")
        return before.replace(".*", "")


@dataclass(frozen=True, slots=True)
class Claim:
    """A parameter that a pattern matches, the text that its `*` match, and the pattern's tuple."""

    name: str
    spec: Spec
    layer: LayerIndex
    patterns: tuple[str, ...]


Claims = list[tuple[ParamGroup, list[Claim]]]
"""The parameters of a bucket, by group."""


def claim_parameters(
    groups: Iterable[ParamGroup], unclaimed: dict[str, Spec], partial: bool
) -> Claims:
    """The parameters that a bucket's groups claim, taken out of `unclaimed`."""
    return [(group, _claim(group, unclaimed, partial)) for group in groups]


def split_by(claims: Claims, key: Callable[[Claim], _Key]) -> dict[_Key, Claims]:
    """The claims of each key, keys in the order of their first appearance.  Each key has all
    groups, also the groups without claims of it.
    """
    claims_by_key = dict[_Key, Claims]()
    for number, (_, claimed) in enumerate(claims):
        for claim in claimed:
            claims_of_key = claims_by_key.setdefault(key(claim), [])
            if not claims_of_key:
                claims_of_key += [(group, []) for group, _ in claims]
            claims_of_key[number][1].append(claim)
    return claims_by_key


def products(claims: Claims) -> list[tuple[str, ...]]:
    """The names of the weights of each product that has several; these lie side by side."""
    joined = list[Claim]()
    for _, claimed in claims:
        joined += [claim for claim in claimed if len(claim.patterns) > 1]
    names = list[tuple[str, ...]]()
    for _, run in groupby(joined, key=lambda claim: (claim.patterns, claim.layer)):
        names.append(tuple(claim.name for claim in run))
    return names


def by_stages(claims: Claims, holders: Holders, together: bool) -> dict[tuple[int, ...], Claims]:
    """The claims of each chunk, by the stages that have its parameters.  There is at least one
    chunk; if `together`, one for all stages.
    """
    claims_by_stages = split_by(claims, lambda claim: holders[claim.name])
    if together or not claims_by_stages:
        all_stages = {*chain.from_iterable(claims_by_stages)}
        return {tuple(sorted(all_stages)): claims}
    return dict(sorted(claims_by_stages.items()))


def _claim(group: ParamGroup, unclaimed: dict[str, Spec], partial: bool) -> list[Claim]:
    """Takes the parameters that a group's patterns match out of `unclaimed`.  Asserts that each
    pattern matches some, unless the model is `partial`.
    """
    claimed: list[Claim] = []
    for patterns in group.patterns:
        matching: list[Claim] = []
        for pattern in patterns:
            names = [name for name in unclaimed if _matches(name, pattern)]
            assert names or partial, (
                f"state: `{pattern}` matches no parameter that is not in a bucket already"
            )
            for name in names:
                layer = _layer(name, pattern)
                matching.append(Claim(name, unclaimed.pop(name), layer, patterns))
        layers = [*dict.fromkeys(claim.layer for claim in matching)]
        claimed += sorted(matching, key=lambda claim: layers.index(claim.layer))
    return claimed


def _matches(name: str, pattern: str) -> bool:
    """Whether each dotted part matches: `layers.*.wq` matches `layers.3.wq` but not
    `layers.3.attention.wq`.
    """
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _layer(name: str, pattern: str) -> LayerIndex:
    """The parts of a dotted name where the pattern has `*`."""
    parts = zip(name.split("."), pattern.split("."), strict=True)
    return tuple(part for part, pattern_part in parts if pattern_part == "*")
