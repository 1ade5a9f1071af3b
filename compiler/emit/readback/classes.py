"""What the readers of all classes of emitted text share, and what they find.

Non-goals: reading them (`declarations`, `forward`).
"""

import ast
from collections import Counter

from attrs import Factory, define, frozen

from ...ir import Program, Region, Type
from .values import Axes, Table


@frozen
class Modules:
    """`nn.ModuleList(…)`: so many modules of a class; or `nn.ModuleDict(…)`: a repeat's turns of this rank's stages."""

    of: str
    turns: int | str


@frozen
class Weight:
    """`weight(…)`, not yet matched to a parameter."""

    call: ast.Call


Attribute = Axes | Table | Modules | Weight


@frozen
class Class:
    """A class of the text: what `__init__` sets, and `forward`."""

    attributes: dict[str, Attribute]
    forward: ast.FunctionDef
    branches: dict[str, ast.expr] = Factory(dict[str, ast.expr])  # the conditions on which attributes are set, if any


@define
class Model:
    """What the readers of all classes share, and what they find."""

    program: Program
    types: dict[str, Type]
    again: "Counter[str]"  # how often backward makes a result of forward once more
    every: dict[str, int]  # of how many turns it does so in one
    names: frozenset[str]  # of the module
    classes: dict[str, Class]  # those not read yet
    same: dict[str, str]
    paths: dict[str, str] = Factory(dict[str, str])  # parameter → its name pattern in the model's state
    taken: int = 0


@frozen
class Place:
    """Where a class stands in the model: the prefix of its weights' names, and the repeats around it.

    A repeat is known by its dim and its line of the plan: the same in forward and in backward.
    """

    prefix: str = ""
    repeats: tuple[tuple[str, str], ...] = ()

    def inside(self, held: str, repeat: Region) -> "Place":
        """That of the classes that `held` has for the turns of a repeat."""
        return Place(f"{self.prefix}{held}.*.", (*self.repeats, (repeat.dim, str(repeat.span))))

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of the repeats around it."""
        return tuple(dim for dim, _ in self.repeats)
