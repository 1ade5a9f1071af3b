"""What a plan says of dims and parameters that `branches` has divided: it means all their parts.

Purpose: the claims of `shard`, the groups of the optimizer and of `state`, the entries of `names hf`, `recompute`.
Non-goals: how they were divided.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from attrs import evolve

from ..config.hf_names import HFWeight, shifted
from ..config.settings import ParamGroup, Train
from ..ir import Claim, Dim, StateAxes
from .split_branches import Copy

Copies = Mapping[str, Sequence[Copy]]


def claims_of_parts(claims: Sequence[Claim], dims: Mapping[str, Sequence[Dim]]) -> tuple[Claim, ...]:
    """A claim for each part of a divided dim."""
    return tuple(
        evolve(claim, dim=name)
        for claim in claims
        for name in ([dim.name for dim in dims[claim.dim]] if claim.dim in dims else [claim.dim])
    )


def train_of_parts(train: Train, copies: Copies, dims: Mapping[str, Sequence[Dim]]) -> Train:
    """The settings with groups that hold all parts of the parameters that they name, and turns of parts done again."""
    groups = tuple(_group(group, copies) for group in train.optimizer.groups)
    again = train.recompute
    if again.word == "every":
        parts = ([part.name for part in dims.get(name, ())] or [name] for name in again.names)
        again = evolve(again, names=tuple(name for each in parts for name in each))
    return evolve(train, optimizer=evolve(train.optimizer, groups=groups), recompute=again)


def _group(group: ParamGroup, copies: Copies) -> ParamGroup:
    return evolve(group, params=_all_meant(group.params, copies))


def state_of_parts(state: Sequence[StateAxes], copies: Copies) -> tuple[StateAxes, ...]:
    """State of all parts of the parameters that it names."""
    return tuple(evolve(each, of=_all_meant(each.of, copies)) for each in state)


def _all_meant(patterns: Sequence[str], copies: Copies) -> tuple[str, ...]:
    return tuple(name for pattern in patterns for name in _meant(pattern, copies))


def _meant(pattern: str, copies: Copies) -> list[str]:
    """The pattern where it matches what it means, else the names of that."""
    meant = [copy.name for name, parts in copies.items() if fnmatchcase(name, pattern) for copy in parts]
    matched = [copy.name for parts in copies.values() for copy in parts if fnmatchcase(copy.name, pattern)]
    return [pattern] if not meant or meant == matched else meant


def names_of_parts(names: Sequence[HFWeight], copies: Copies) -> Iterator[HFWeight]:
    """An entry for each part of a parameter, whose index goes on where that of the part before ends."""
    for each in names:
        for copy in copies.get(each.param, ()):
            yield evolve(shifted(each, copy.starts), param=copy.name)
