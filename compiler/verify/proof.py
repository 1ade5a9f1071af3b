"""Holds the sharded step to the single-device step, value by value, in a prime field.

Purpose: `prove`: equal, with how sure that is, or the first result that differs.
Non-goals: why it differs (`locate`).
"""

from math import log2

from attrs import frozen

from ..ir import Program, Type
from .field import P, Field
from .machine import Machine, Outcome, ShapeError, differing
from .reference import Reference
from .scene import everywhere, scene
from .shapes import Sizes, meshes, resized, small
from .tensors import Tensor
from .world import World

BOUND = 2.0**-50
"""How probable it may be that unequal steps agree."""

TRIALS = 7


@frozen
class Case:
    """The step at one choice of small sizes: the sharded program, and the model that it must equal."""

    program: Program
    model: Program

    @property
    def mesh(self) -> Sizes:
        """The axes' sizes."""
        return {axis.name: axis.size for axis in self.program.axes}


def cases(program: Program, model: Program) -> list[Case]:
    """The sizes at which a program is evaluated; `model` is the plan's before any placement, or the program itself."""
    return [case(program, model, axes) for axes in meshes(program)]


def case(program: Program, model: Program, axes: Sizes) -> Case:
    dims = small(program, axes)
    return Case(resized(program, axes, dims), resized(model, axes, dims))


@frozen
class Difference:
    """A result of the step that is not the single device's."""

    case: Case
    result: str


def compare(case: Case, numbers: Field) -> list[str]:
    """The names of the results that differ."""
    start = scene(case.program, numbers)
    expected = Reference(case.model, numbers).run(start)
    world = World.of(case.program)
    try:
        found = Machine(case.program, world, numbers).run(start.on(case.program, world))
    except ShapeError as error:
        return [error.value]
    return _unequal(case.program, world, numbers, found, expected)


def _unequal(program: Program, world: World, numbers: Field, found: Outcome, expected: Outcome) -> list[str]:
    """The results that differ on any rank from what it should hold of the single device's."""
    scalar = Type("", ())
    types = {p.name: p.type for p in program.params}
    pairs = [
        *((name, found.metrics[name], value, scalar) for name, value in expected.metrics.items()),
        *((f"gradient of {name}", found.gradients[name], value, types[name]) for name, value in expected.gradients.items()),
        *((f"updated {name}", found.parameters[name], value, types[name]) for name, value in expected.parameters.items()),
    ]
    return [name for name, own, whole, type in pairs if differing(numbers, own, world.spread(whole, type))]
