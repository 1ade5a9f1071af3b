"""Evaluates variants of a program, each no further than it differs from the program.

Purpose: speed: hundreds of mutants of one program are evaluated, most of which differ from it late.
Non-goals: being noticed: the outcome is `machine`'s.
"""

from collections.abc import Callable, Hashable

from attrs import field, frozen

from ..ir import Leave, Op
from .machine import Env, Machine
from .tensors import Tensor

Memory = dict[tuple[Hashable, ...], tuple[list[Tensor], Env]]
"""What was made of which tensors.  They are told apart by identity, so they are kept, lest another take their place."""


@frozen
class Replay(Machine):
    """An evaluation that recalls what an earlier one made of the same tensors; that one was `learning`."""

    memory: Memory = field(factory=Memory)
    learning: bool = False

    def _op(self, op: Op, env: Env) -> Env:
        if op.kind == "update":  # tells the gradients too
            return super()._op(op, env)
        return self._recalled((id(op),), [env[name] for name in op.inputs], lambda: Machine._op(self, op, env))

    def _slice(self, x: Tensor, index: int) -> Tensor:
        return self._recalled(("slice", index), [x], lambda: {"": Machine._slice(self, x, index)})[""]

    def _left(self, leave: Leave, dim: str, all_: tuple[Tensor, ...]) -> Tensor:
        return self._recalled((leave, dim), [*all_], lambda: {"": Machine._left(self, leave, dim, all_)})[""]

    def _recalled(self, made_by: tuple[Hashable, ...], tensors: list[Tensor], make: Callable[[], Env]) -> Env:
        key = (*made_by, *map(id, tensors))
        if key in self.memory:
            return self.memory[key][1]
        made = make()
        if self.learning:
            self.memory[key] = (tensors, made)
        return made
