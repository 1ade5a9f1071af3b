"""Evaluates variants of a program, each no further than it differs from the program.

Purpose: speed: hundreds of mutants of one program are evaluated, most of which differ from it late.
Non-goals: being noticed: the outcome is `machine`'s.
"""

from collections.abc import Callable, Hashable, Sequence

from attrs import field, frozen

from ..ir import Op
from .interpreter import Env, Interpreter
from .tensors import Tensor

Memory = dict[tuple[Hashable, ...], tuple[object, list[Tensor], Env]]
"""What was made of which tensors, and by what.  These are told apart by identity, so they are kept, lest another take
their place."""


@frozen
class Replay(Interpreter):
    """An evaluation that recalls what an earlier one made of the same tensors; that one was `learning`."""

    memory: Memory = field(factory=Memory)
    learning: bool = False

    def _op(self, op: Op, env: Env) -> Env:
        if op.kind == "update":  # tells the gradients too
            return super()._op(op, env)
        return self._recalled((id(op),), op, [env[name] for name in op.inputs], lambda: Interpreter._op(self, op, env))

    def made(self, how: tuple[Hashable, ...], of: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
        return self._recalled(how, None, [*of], lambda: {"": make()})[""]

    def _recalled(self, how: tuple[Hashable, ...], by: object, tensors: list[Tensor], make: Callable[[], Env]) -> Env:
        key = (*how, *map(id, tensors))
        if key in self.memory:
            return self.memory[key][2]
        made = make()
        if self.learning:
            self.memory[key] = (by, tensors, made)
        return made
