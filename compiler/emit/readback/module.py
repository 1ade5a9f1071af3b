"""Reads the whole text: what the module binds, then what its functions do.

Non-goals: how it is run (`machine`), and what it is compared with (`forward`, `step`, `build`).
"""

import ast
from collections.abc import Sequence

from ...analysis.certificate import get_user_functions
from ...analysis.kernel_tiles import kernels_of, tiles_file
from ...ir import Program, walk
from ..imports import IMPORTS
from .annotations import types_of
from .build import Build
from .constants import companion_call, constants, sizes
from .execute import body_of
from .forward import Forward
from .machine import Machine
from .plan import check_plan, settings_of_files
from .stages import StagedForward
from .step import Step
from .terms import Term, Terms, demand, frozen_key, wrong
from .values import Function, Instance
from .weights import Weights

MAIN = 'if __name__ == "__main__":\n    train(PLAN, build, train_step, eval_step)'


class File:
    """Reads one text."""

    def __init__(self, program: Program, tree: ast.Module) -> None:
        self._program, self._tree = program, tree
        self.machine = Machine(Terms())
        self._modules = {function.partition(":")[0] for function in get_user_functions(program)}
        self._wanted = constants(program) | _kernels(program)
        self._sizes = sizes(program)
        self._plan: list[tuple[ast.Assign, object]] = []

    def bind(self) -> None:
        """Runs the statements of the module, but for the last one, which trains."""
        *body, last = body_of(self._tree)
        for stmt in body:
            self._statement(stmt)
        demand(
            last,
            ast.dump(last) == ast.dump(ast.parse(MAIN).body[0]),
            f"the last statement should be `{MAIN}`",
        )

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Import(names=[ast.alias(name=name, asname=None)]) if name in {
                "torch",
                *self._modules,
            }:
                self.machine.define(stmt, name, self.machine.terms.name(name))
            case ast.ImportFrom():
                self._import(stmt)
            case ast.ClassDef() | ast.FunctionDef():
                self.machine.run([stmt])
            case ast.Assign(targets=[target]) if {*names_of(target)} <= {*self._sizes}:
                self._size(stmt, names_of(target))
            case ast.Assign(targets=[ast.Name(id=name)]):
                self._constant(stmt, name)
            case _:
                raise wrong(stmt, f"`{ast.unparse(stmt)}` is no part of a program")

    def _import(self, stmt: ast.ImportFrom) -> None:
        allowed = IMPORTS.get(stmt.module or "", ())
        for alias in stmt.names:
            fits = alias.name in allowed and not alias.asname and not stmt.level
            demand(stmt, fits, f"imports {alias.name} of {stmt.module}")
            self.machine.define(stmt, alias.name, self.machine.terms.name(alias.name))

    def _constant(self, stmt: ast.Assign, name: str) -> None:
        """A function made of a kernel, what a program says of its pipeline, or its plan."""
        value, wanted = self.machine.value(stmt.value), self._wanted.get(name)
        if wanted:
            wanted_value = self.machine.spec(wanted)
            demand(
                stmt,
                frozen_key(value) == frozen_key(wanted_value),
                f"`{name}` is {value}, not {wanted_value}",
            )
        elif name == "PLAN":
            self._plan.append((stmt, value))
        else:
            raise wrong(stmt, f"`{name}` is no part of a program")
        self.machine.define(
            stmt, name, self.machine.terms.name(name) if isinstance(value, Term) else value
        )

    def _size(self, stmt: ast.Assign, names: Sequence[str]) -> None:
        """Sizes of dims, each by the dim's name in capitals."""
        value = self.machine.value(stmt.value)
        values = value if isinstance(stmt.targets[0], ast.Tuple) else (value,)
        wanted = tuple(self._sizes[name] for name in names)
        demand(
            stmt, frozen_key(values) == frozen_key(wanted), f"{', '.join(names)} are not {wanted}"
        )
        for name, size in zip(names, wanted, strict=True):
            self.machine.define(stmt, name, size)

    # ---- what is done

    def compare(self) -> int:
        """Reads everything; returns how many ops it does, which are all of the program."""
        self.bind()
        machine, program = self.machine, self._program
        build, train, evaluate = self._functions()
        build_result = Build(machine, build, program)
        weights = Weights(machine, program)
        if isinstance(build_result.whole, Instance):
            weights.declare(build_result.whole)
            weights.demand_all(build_result.whole.class_of_module.node)
        steps = [Step(machine, program, node, weights.paths) for node in (train, evaluate)]
        for step in steps:
            step.compare()
        demand(
            evaluate,
            steps[0].model_inputs == steps[1].model_inputs,
            "calls the model otherwise than training does",
        )
        if program.pipeline:
            forward: Forward | StagedForward = StagedForward(
                machine, program, program.pipeline, weights
            )
            forward.compare_all(build_result.model, steps[0].model_inputs)
        else:
            forward = Forward(machine, program, weights.paths)
            assert isinstance(build_result.whole, Instance), "emit: no model"
            forward.compare(build_result.whole, steps[0].model_inputs)
        for bias, path in steps[0].biases.items():
            demand(
                train, path == weights.paths[bias], f"balances {path}, not {weights.paths[bias]}"
            )
        build_result.check(weights.paths)
        check_plan(
            machine,
            *self._plan[0],
            program,
            settings_of_files(program, weights.paths, build_result.dtype()),
        )
        machine.demand_all(self._tree)
        expected = {op.outputs[0].name for op in walk(program.forward.body)}
        missing = expected - forward.done_ops
        demand(self._tree, not missing, f"does not do {', '.join(sorted(missing))}")
        return len(program.ops)

    def _functions(self) -> list[ast.FunctionDef]:
        names = self.machine.module_names
        nodes = {
            name: function.node
            for name, function in names.items()
            if isinstance(function, Function)
        }
        last = self._tree.body[-1]
        demand(
            last, sorted(nodes) == ["build", "eval_step", "train_step"], f"defines {sorted(nodes)}"
        )
        demand(
            last,
            {"PLAN", "train", *self._wanted} <= {*names},
            "has no plan, or does not bind all that a program needs",
        )
        for name, node in nodes.items():
            types_of(node)
            decorators = ["torch.no_grad()"] if name == "eval_step" else []
            demand(
                node,
                [*map(ast.unparse, node.decorator_list)] == decorators,
                "is decorated otherwise",
            )
        return [nodes[name] for name in ("build", "train_step", "eval_step")]


def names_of(target: ast.expr) -> list[str]:
    """The names that a target binds, in their order; what it sets besides goes by none."""
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return [element.id if isinstance(element, ast.Name) else "" for element in targets]


def _kernels(program: Program) -> dict[str, str]:
    """The calls that read the file of tiles and make functions of kernels, if there are any."""
    texts = {"TILES": companion_call("read_tiles", *file) for file in tiles_file(program).items()}  # noqa: B035
    for used in kernels_of(program):
        chunk = f", chunk={used.chunk}" if used.chunk else ""
        texts[used.function] = f"{used.name}(TILES[{used.name!r}]{chunk})"
    return texts
