"""Evaluates variants of a program, each no further than it differs from the program and no
further than its loss.
"""

from collections.abc import Callable, Container, Hashable, Sequence

from attrs import evolve, field, frozen

from ...compiler.ir import Op, Program, Region, Stmt, results, uses
from ...compiler.proof.interpreter import Env, Interpreter
from ...compiler.proof.tensors import Tensor

Memory = dict[tuple[Hashable, ...], tuple[object, list[Tensor], Env]]
"""The results of each op by its tensors.  These are told apart by identity, so they are kept, lest
another take their place."""


@frozen
class Replay(Interpreter):
    """An evaluation that recalls what an earlier one made of the same tensors; that one was
    `learning`.
    """

    memory: Memory = field(factory=Memory)
    learning: bool = False

    def _op(self, op: Op, env: Env) -> Env:
        if op.kind == "update":  # tells the gradients too
            return super()._op(op, env)
        return self._recalled(
            (id(op),), op, [env[name] for name in op.inputs], lambda: Interpreter._op(self, op, env)
        )

    def make_tensor(
        self, how: tuple[Hashable, ...], operands: Sequence[Tensor], make: Callable[[], Tensor]
    ) -> Tensor:
        return self._recalled(how, None, [*operands], lambda: {"": make()})[""]

    def _recalled(
        self, how: tuple[Hashable, ...], by: object, tensors: list[Tensor], make: Callable[[], Env]
    ) -> Env:
        key = (*how, *map(id, tensors))
        if key in self.memory:
            return self.memory[key][2]
        made = make()
        if self.learning:
            self.memory[key] = (by, tensors, made)
        return made


def forward(program: Program) -> tuple[Stmt, ...]:
    """The statements of a step that its loss depends on."""
    wanted, found = {program.region.yields[0].name}, list[Stmt]()
    for stmt in reversed(program.region.body):
        if wanted & {value.name for value in results(stmt)}:
            own = _ahead(stmt, wanted) if isinstance(stmt, Region) else stmt
            found.append(own)
            wanted |= uses(own).keys()
    return tuple(reversed(found))


def _ahead(microbatches: Region, wanted: Container[str]) -> Region:
    """The microbatches without backward, and of their results those that are wanted."""
    pairs = zip(microbatches.yields, microbatches.results, strict=True)
    ends = [(end, value) for end, value in pairs if value.name in wanted]
    return evolve(
        microbatches,
        body=tuple(
            stmt
            for stmt in microbatches.body
            if not isinstance(stmt, Region) or stmt.kind != "backward"
        ),
        yields=tuple(end for end, _ in ends),
        results=tuple(value for _, value in ends),
    )
