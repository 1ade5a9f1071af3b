"""Reads the whole text of a program of torch alone: what its module binds, then what its functions
do.

Non-goals: how it is run (`machine`), and what its functions are compared with (`expected`).
"""

import ast
import builtins
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import cast

from ....analysis.bucket_layout import get_stored_dims
from ....ir import Param, Pipeline, Program, walk
from ...hf_names import plain_names
from ...imports import names_in
from ...readback.calls import placement_text
from ...readback.constants import constants
from ...readback.execute import body_of
from ...readback.forward import Forward
from ...readback.module import File, names_of
from ...readback.stages import StagedForward
from ...readback.terms import Terms, demand, frozen_key, wrong
from ...readback.values import Function, Instance
from ...readback.weights import Weights
from ...target import DTENSOR, mesh_axes, whole_mesh
from ..imports import STANDARD, TORCH, get_library_names, library_import
from .expected import CROSSING, FUNCTIONS, MAIN, Plan, crossing, demand_known
from .machine import Step, TorchMachine, steps

MODULE_OF = {name: module for module, names in (*STANDARD, *TORCH) for name in names}
"""The module of each name that a program may import, besides the names of the library."""

INIT = {"normal": ", std={!r}", "ones": ", mean=1.0", "zeros": ""}
"""The argument of `weight` for each kind of initial values."""


class TorchWeights(Weights):
    """The weights of a program, DTensors of global shapes."""

    def make_declaration(self, param: Param) -> object:
        """The call that declares a parameter, with its placements on the mesh."""
        shape = tuple(get_stored_dims(param))
        sizes: list[str] = []
        for dims in shape:
            sizes.append(str(prod(self.program.size(dim) for dim in dims)))
        placements: list[str] = []
        for axis in mesh_axes(self.program):
            placements.append(placement_text(param.type.placement_on(axis), shape))
        init = INIT[param.init.kind].format(*param.init.args)
        arguments = f"mesh, {', '.join(sizes)}, placements=[{', '.join(placements)}]{init}"
        return self.machine.spec(f"weight({arguments})")


class TorchFile(File):
    """Reads one text."""

    def __init__(self, program: Program, text: str) -> None:
        super().__init__(program, ast.parse(text))
        self._run = TorchMachine(Terms())
        self.machine = self._run
        self._numbers = {
            "GLOBAL_BATCH": program.train.global_batch,
            "MICROBATCHES": program.size("microbatches"),
            "STEPS": program.train.steps,
            "SEED": program.train.seed,
        }
        self._wanted = _constants(program)
        self._names: dict[ast.AST, object] = {}
        self._main: ast.FunctionDef | None = None

    # ---- what the module binds

    def bind(self) -> None:
        """Runs the statements of the module.

        The last statement of a program that trains on a file's bytes calls `main`.
        """
        main, call_of_main = ast.parse(MAIN).body
        body = body_of(self._tree)
        last = body[-1]
        calls_main = ast.dump(last) == ast.dump(call_of_main)
        for stmt in body[:-1] if calls_main else body:
            if isinstance(stmt, ast.FunctionDef) and stmt.name == "main":
                self._bind_main(stmt, main)
            else:
                self._statement(stmt)
        should = f"the last statement should be `{ast.unparse(call_of_main)}`"
        demand(last, calls_main == (self._main is not None), should)
        if self._main:
            known = {*self.machine.module_names, *dir(builtins)}
            missing = sorted(names_in(ast.unparse(self._main)) - known)
            demand(self._main, not missing, f"uses {', '.join(missing)}, which nothing defines")

    def _bind_main(self, stmt: ast.FunctionDef, wanted: ast.stmt) -> None:
        demand_same(stmt, wanted)
        self.machine.define(stmt, stmt.name, self.machine.terms.name(stmt.name))
        self._main = stmt

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Import(names=[ast.alias() as alias]) if self._is_import(stmt, alias):
                name = alias.asname or alias.name
                self.machine.define(stmt, name, self.machine.terms.name(name))
            case ast.Try():
                self._import_library(stmt)
            case ast.Assign(targets=[ast.Tuple() as target]) if self._are_numbers(target):
                self._bind_numbers(stmt)
            case ast.Assign(targets=[ast.Name(id="NAMES")]):
                self._names[stmt] = self.machine.value(stmt.value)
                self.machine.define(stmt, "NAMES", self._names[stmt])
            case _:
                super()._statement(stmt)

    def _is_import(self, stmt: ast.Import, alias: ast.alias) -> bool:
        """Whether a statement imports a module of Python's or torch's as programs do."""
        return MODULE_OF.get(alias.asname or alias.name) == ast.unparse(stmt)

    def _are_numbers(self, target: ast.Tuple) -> bool:
        return names_of(target) == [*self._numbers]

    def _bind_numbers(self, stmt: ast.Assign) -> None:
        value, wanted = self.machine.value(stmt.value), tuple(self._numbers.values())
        is_same = frozen_key(value) == frozen_key(wanted)
        demand(stmt, is_same, f"{', '.join(self._numbers)} are not {wanted}")
        for name, number in self._numbers.items():
            self.machine.define(stmt, name, number)

    def _import(self, stmt: ast.ImportFrom) -> None:
        for alias in stmt.names:
            fits = MODULE_OF.get(alias.name) == stmt.module and not alias.asname and not stmt.level
            demand(stmt, fits, f"imports {alias.name} of {stmt.module}")
            self.machine.define(stmt, alias.name, self.machine.terms.name(alias.name))

    def _import_library(self, stmt: ast.Try) -> None:
        """Binds the names of the library that a program imports."""
        names: list[str] = []
        for node in ast.walk(stmt):
            if isinstance(node, ast.ImportFrom):
                names += [alias.name for alias in node.names]
                unknown = sorted({*names} - get_library_names())
                demand(node, not unknown, f"imports {', '.join(unknown)}, which is not there")
        wanted = ast.parse("\n".join(library_import(names))).body[0]
        demand_same(stmt, wanted)
        for name in names:
            self.machine.define(stmt, name, self.machine.terms.name(name))

    # ---- what is done

    def compare(self) -> int:
        """Reads everything; returns how many ops it does, which are all of the program."""
        demand_known(self._program)
        self.bind()
        functions = self._functions_of_plan()
        built, result_of_build = self._run.run_with_log(
            lambda: self._run_function(functions["build"])
        )
        weights = TorchWeights(self._run, self._program)
        forward = self._compare_forward(functions["build"], result_of_build, weights)
        plan = Plan(self._program, weights.paths, self._run.classes[-1].node.name)
        for name, node in functions.items():
            log, result = built, result_of_build
            if name != "build":
                log, result = self._run.run_with_log(partial(self._run_function, node))
            self._compare(plan, node, [*steps(log)], result)
        self._demand_names(weights.paths)
        for stmt in self._tree.body:
            if stmt is not self._main:
                self._run.demand_all(ast.Module([stmt], []))
        ops = {op.outputs[0].name for op in walk(self._program.forward.body)}
        missing = sorted(ops - forward.done_ops)
        demand(self._tree, not missing, f"does not do {', '.join(missing)}")
        return len(self._program.ops)

    def _functions_of_plan(self) -> dict[str, ast.FunctionDef]:
        """The functions that a program has for its plan, by name."""
        nodes: dict[str, ast.FunctionDef] = {}
        for name, function in self.machine.module_names.items():
            if isinstance(function, Function):
                nodes[name] = function.node
        wanted = {*FUNCTIONS, *(["crossing"] if self._program.pipeline else [])}
        demand(self._tree, {*nodes} == wanted, f"defines {', '.join(nodes)}")
        for node in nodes.values():
            self._run.compared |= {*ast.walk(node.args)}
            if node.returns:
                self._run.compared |= {*ast.walk(node.returns)}
        return {name: nodes[name] for name in FUNCTIONS}

    def _run_function(self, node: ast.FunctionDef) -> object:
        """The result of a function, of arguments that go by their names."""
        return self._run.function(node, [self._run.terms.name(arg.arg) for arg in node.args.args])

    def _compare_forward(
        self, build: ast.FunctionDef, result: object, weights: TorchWeights
    ) -> Forward | StagedForward:
        """Compares the model that `build` returns, or its stages, with the forward of the IR."""
        machine, program = self._run, self._program
        inputs = Plan(program, {}, "").inputs
        if program.pipeline:
            staged = StagedForward(machine, program, program.pipeline, weights, DTENSOR)
            staged.compare_all(machine.classes[-1], inputs)
            self._compare_crossing(program.pipeline)
            return staged
        model = cast("tuple[object, ...]", result)[0] if isinstance(result, tuple) else None
        if not isinstance(model, Instance):
            raise wrong(build, "makes no model")
        weights.declare(model)
        weights.demand_all(model.class_of_module.node)
        forward = Forward(machine, program, weights.paths, DTENSOR)
        forward.compare(model, inputs)
        return forward

    def _compare(
        self, plan: Plan, node: ast.FunctionDef, actual: Sequence[Step], actual_result: object
    ) -> None:
        """Raises where a function of the text does anything else than the plan's."""
        machine = self._run
        wanted = _parse_function(FUNCTIONS[node.name](plan))
        _demand_same_header(node, wanted)
        names = {arg.arg: machine.terms.name(arg.arg) for arg in wanted.args.args}
        log, result = machine.run_with_log(lambda: machine.run_expected(wanted.body, names))
        expected = [*steps(log)]
        for (place, what), (_, other) in zip(actual, expected, strict=False):
            why = f"{_to_text(what)}, where the plan has {_to_text(other)}"
            demand(place, what == other, f"`{_first_line(place)}` is {why}")
        last = node.body[-1]
        extra = actual[len(expected)][0] if len(actual) > len(expected) else last
        is_same_length = len(actual) == len(expected)
        demand(extra, is_same_length, f"`{node.name}` does more or less than the plan")
        is_same_result = frozen_key(actual_result) == frozen_key(result)
        demand(last, is_same_result, f"returns {actual_result}, not {result}")

    def _compare_crossing(self, pipeline: Pipeline) -> None:
        """Raises where what crosses after a stage has another shape, type or placements."""
        machine, function = self._run, self.machine.module_names["crossing"]
        assert isinstance(function, Function), "emit: no function of what crosses"
        node = function.node
        _demand_same_header(node, _parse_function([CROSSING]))
        for stage, text in enumerate(crossing(self._program, pipeline)):
            call: Callable[[], object] = partial(
                machine.function, node, [machine.terms.name("mesh"), stage]
            )
            log, examples = machine.run_with_log(call)
            wanted_log, wanted = machine.run_with_log(partial(machine.spec, text))
            is_same = frozen_key(examples) == frozen_key(wanted)
            demand(node, is_same, f"after stage {stage} {examples} cross, not {wanted}")
            actual_steps = [what for _, what in steps(log)]
            wanted_steps = [what for _, what in steps(wanted_log)]
            demand(node, actual_steps == wanted_steps, "`crossing` does more than the plan")

    def _demand_names(self, paths: dict[str, str]) -> None:
        """The names of tensors in files, where each is a parameter's."""
        wanted: dict[str, str] = {}
        if plain_names(self._program, paths):
            wanted = {paths[weight.param]: weight.tensor for weight in self._program.names}
        for stmt, value in self._names.items():
            demand(stmt, value == wanted, f"the names of tensors should be {wanted}, not {value}")
        has_names = bool(self._names)
        demand(self._tree, bool(wanted) == has_names, "has no names of tensors, or has some")


def _constants(program: Program) -> dict[str, str]:
    """The constants of a program besides sizes and numbers."""
    texts = {"MESH": repr(whole_mesh(program))}
    if pipeline := program.pipeline:
        texts["LAYERS_OF_STAGE"] = constants(program)["LAYERS_OF_STAGE"]
        texts["STAGE_TO_RANK"] = repr(pipeline.stage_to_rank)
        texts["INNER"] = repr(tuple(mesh_axes(program)))
    return texts


def demand_same(actual: ast.AST, wanted: ast.AST, place: ast.AST | None = None) -> None:
    """Raises where a text is not word for word the same as in all programs, with the innermost
    line that differs.
    """
    if ast.dump(actual) == ast.dump(wanted):
        return
    place = actual if hasattr(actual, "lineno") else place
    children, wanted_children = [*ast.iter_child_nodes(actual)], [*ast.iter_child_nodes(wanted)]
    if len(children) == len(wanted_children) and type(actual) is type(wanted):
        for child, wanted_child in zip(children, wanted_children, strict=True):
            demand_same(child, wanted_child, place)
    should = f"`{_first_line(actual)}` should be `{_first_line(wanted)}`, as in all programs"
    raise wrong(place or actual, should)


def _parse_function(lines: Iterable[str]) -> ast.FunctionDef:
    (function,) = ast.parse("\n".join(lines)).body
    assert isinstance(function, ast.FunctionDef), "emit: no function"
    return function


def _demand_same_header(actual: ast.FunctionDef, wanted: ast.FunctionDef) -> None:
    header, wanted_header = _header(actual), _header(wanted)
    demand(actual, header == wanted_header, f"`{header}` should be `{wanted_header}`")


def _header(node: ast.FunctionDef) -> str:
    decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
    returned = ""
    if node.returns:
        returned = ast.unparse(node.returns)
    return f"{decorators}{node.name}({ast.unparse(node.args)}) -> {returned}"


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def _to_text(what: object) -> str:
    return "a loop or a choice" if isinstance(what, tuple) else str(what)
