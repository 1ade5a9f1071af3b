"""Reads the whole text of a program of torch alone: what its module binds, then what its functions
do.

Non-goals: how it is run (`machine`), and what its functions are compared with (`expected`).
"""

import ast
import re
from functools import partial
from math import prod
from typing import cast

from ....analysis.bucket_layout import get_stored_dims
from ....ir import Param, Pipeline, Program, walk
from ....syntax.package_data import folder
from ...hf_names import plain_names
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
from ..imports import MODULES, names_in, ops_source
from .expected import CROSSING, FUNCTIONS, Plan, crossing, demand_known
from .machine import TorchMachine, steps

MAIN = 'if __name__ == "__main__":\n    main()'

IMPORTED = {name: module for module, names in MODULES for name in names}
"""The module of each name that a program may import."""


class TorchWeights(Weights):
    """The weights of a program, DTensors of global shapes."""

    def make_declaration(self, param: Param) -> object:
        """The call that declares a parameter, with its placements on the mesh."""
        shape = tuple(get_stored_dims(param))
        sizes = ", ".join(str(prod(map(self.program.size, dims))) for dims in shape)
        over = ", ".join(
            placement_text(param.type.placement_on(axis), shape) for axis in mesh_axes(self.program)
        )
        args = param.init.args
        init = {"normal": f", std={args[0]!r}" if args else "", "ones": ", mean=1.0", "zeros": ""}[
            param.init.kind
        ]
        return self.machine.spec(f"weight(mesh, {sizes}, placements=[{over}]{init})")


class TorchFile(File):
    """Reads one text."""

    def __init__(self, program: Program, text: str) -> None:
        super().__init__(program, ast.parse(text))
        self._run = TorchMachine(Terms())
        self.machine = self._run
        definitions = ast.parse(f"{_template(program)}\n{ops_source(text)}").body
        self._fixed = {
            node.name: node
            for node in definitions
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        train = program.train
        self._numbers = {
            "GLOBAL_BATCH": train.global_batch,
            "MICROBATCHES": program.size("microbatches"),
            "STEPS": train.steps,
            "SEED": train.seed,
        }
        self._wanted = _constants(program)
        self._names: dict[ast.AST, object] = {}

    # ---- what the module binds

    def bind(self) -> None:
        """Runs the statements of the module; the last one of a program that reads a file runs
        it.
        """
        body = body_of(self._tree)
        runs = "main" in self._fixed and ast.dump(body[-1]) == ast.dump(ast.parse(MAIN).body[0])
        for stmt in body[:-1] if runs else body:
            self._statement(stmt)
        names = self.machine.module_names
        demand(body[-1], runs == ("main" in names), f"the last statement should be `{MAIN}`")
        for stmt in body:
            if isinstance(stmt, ast.FunctionDef | ast.ClassDef) and stmt.name in self._fixed:
                missing = sorted(names_in(ast.unparse(stmt)) & self._all_names() - {*names})
                demand(stmt, not missing, f"uses {', '.join(missing)}, which nothing defines")

    def _all_names(self) -> set[str]:
        """The names that any program binds."""
        return {
            *IMPORTED,
            *self._fixed,
            *FUNCTIONS,
            *self._sizes,
            *self._numbers,
            *self._wanted,
            "NAMES",
        }

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Import(names=[ast.alias(name=name, asname=asname)]) if IMPORTED.get(
                asname or name
            ) == (ast.unparse(stmt)):
                self.machine.define(stmt, asname or name, self.machine.terms.name(asname or name))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if name in self._fixed:
                demand_same(stmt, self._fixed[name])
                self.machine.define(stmt, name, self.machine.terms.name(name))
            case ast.Assign(targets=[ast.Tuple() as target]) if names_of(target) == [
                *self._numbers
            ]:
                value, wanted = self.machine.value(stmt.value), (*self._numbers.values(),)
                demand(
                    stmt,
                    frozen_key(value) == frozen_key(wanted),
                    f"{', '.join(self._numbers)} are not {wanted}",
                )
                for name, number in self._numbers.items():
                    self.machine.define(stmt, name, number)
            case ast.Assign(targets=[ast.Name(id="NAMES")]):
                self._names[stmt] = self.machine.value(stmt.value)
                self.machine.define(stmt, "NAMES", self._names[stmt])
            case _:
                super()._statement(stmt)

    def _import(self, stmt: ast.ImportFrom) -> None:
        for alias in stmt.names:
            fits = IMPORTED.get(alias.name) == stmt.module and not alias.asname and not stmt.level
            demand(stmt, fits, f"imports {alias.name} of {stmt.module}")
            self.machine.define(stmt, alias.name, self.machine.terms.name(alias.name))

    # ---- what is done

    def compare(self) -> int:
        """Reads everything; returns how many ops it does, which are all of the program."""
        demand_known(self._program)
        self.bind()
        machine, program = self._run, self._program
        functions = self._of_plan()
        built, result_of_build = machine.run_with_log(
            lambda: self._run_function(functions["build"])
        )
        weights, (*_, model) = TorchWeights(machine, program), machine.classes
        inputs = Plan(program, {}, "").inputs
        if program.pipeline:
            forward: Forward | StagedForward = StagedForward(
                machine, program, program.pipeline, weights, DTENSOR
            )
            forward.compare_all(model, inputs)
            self._compare_crossing(program.pipeline)
        else:
            whole = (
                cast(tuple[object, ...], result_of_build)[0]
                if isinstance(result_of_build, tuple)
                else None
            )
            if not isinstance(whole, Instance):
                raise wrong(functions["build"], "makes no model")
            weights.declare(whole)
            weights.demand_all(whole.class_of_module.node)
            forward = Forward(machine, program, weights.paths, DTENSOR)
            forward.compare(whole, inputs)
        plan = Plan(program, weights.paths, model.node.name)
        for name, node in functions.items():
            log, result = (
                (built, cast(object, result_of_build))
                if name == "build"
                else machine.run_with_log(partial(self._run_function, node))
            )
            self._compare(plan, node, [*steps(log)], result)
        self._demand_names(weights.paths)
        for stmt in self._tree.body:
            if not (isinstance(stmt, ast.FunctionDef | ast.ClassDef) and stmt.name in self._fixed):
                machine.demand_all(ast.Module([stmt], []))
        missing = {op.outputs[0].name for op in walk(program.forward.body)} - forward.done_ops
        demand(self._tree, not missing, f"does not do {', '.join(sorted(missing))}")
        return len(program.ops)

    def _of_plan(self) -> dict[str, ast.FunctionDef]:
        nodes = {
            name: function.node
            for name, function in self.machine.module_names.items()
            if isinstance(function, Function)
        }
        wanted = {*FUNCTIONS, *(["crossing"] if self._program.pipeline else [])}
        demand(self._tree, {*nodes} == wanted, f"defines {', '.join(nodes)}")
        for node in nodes.values():
            self._run.compared |= {*ast.walk(node.args)} | {
                *(ast.walk(node.returns) if node.returns else ())
            }
        return {name: nodes[name] for name in FUNCTIONS}

    def _run_function(self, node: ast.FunctionDef) -> object:
        """The result of a function, of arguments that go by their names."""
        return self._run.function(node, [self._run.terms.name(arg.arg) for arg in node.args.args])

    def _compare(
        self,
        plan: Plan,
        node: ast.FunctionDef,
        actual: "list[tuple[ast.AST, object]]",
        actual_result: object,
    ) -> None:
        """Raises where a function of the text does anything else than the plan's."""
        machine, (wanted,) = self._run, ast.parse("\n".join(FUNCTIONS[node.name](plan))).body
        assert isinstance(wanted, ast.FunctionDef), f"emit: {node.name} is no function"
        demand(
            node,
            _header(node) == _header(wanted),
            f"`{_header(node)}` should be `{_header(wanted)}`",
        )
        names = {arg.arg: machine.terms.name(arg.arg) for arg in wanted.args.args}
        log, result = machine.run_with_log(lambda: machine.run_expected(wanted.body, names))
        expected = [*steps(log)]
        for (place, what), (_, other) in zip(actual, expected, strict=False):
            demand(
                place,
                what == other,
                f"`{_first_line(place)}` is {_to_text(what)}, where the plan has {_to_text(other)}",
            )
        extra = actual[len(expected) :] or [(node.body[-1], None)]
        demand(
            extra[0][0],
            len(actual) == len(expected),
            f"`{node.name}` does more or less than the plan",
        )
        demand(
            node.body[-1],
            frozen_key(actual_result) == frozen_key(result),
            f"returns {actual_result}, not {result}",
        )

    def _compare_crossing(self, pipeline: Pipeline) -> None:
        """Raises where what crosses after a stage has another shape, type or placements."""
        machine, function = self._run, self.machine.module_names["crossing"]
        assert isinstance(function, Function), "emit: no function of what crosses"
        (wanted,) = ast.parse(CROSSING).body
        assert isinstance(wanted, ast.FunctionDef), "emit: no header of what crosses"
        demand(
            function.node,
            _header(function.node) == _header(wanted),
            f"`{_header(function.node)}` should be `{_header(wanted)}`",
        )
        for stage, text in enumerate(crossing(self._program, pipeline)):
            log, examples_of_text = machine.run_with_log(
                partial(machine.function, function.node, [machine.terms.name("mesh"), stage])
            )
            examples, examples_of_plan = machine.run_with_log(partial(machine.spec, text))
            demand(
                function.node,
                frozen_key(examples_of_text) == frozen_key(examples_of_plan),
                f"after stage {stage} {examples_of_text} cross, not {examples_of_plan}",
            )
            terms_of_text, terms_of_plan = (
                [what for _, what in steps(entries)] for entries in (log, examples)
            )
            demand(
                function.node, terms_of_text == terms_of_plan, "`crossing` does more than the plan"
            )

    def _demand_names(self, paths: dict[str, str]) -> None:
        """The names of tensors in files, where each is a parameter's."""
        wanted = {paths[weight.param]: weight.tensor for weight in self._program.names}
        wanted = wanted if plain_names(self._program, paths) else {}
        for stmt, value in self._names.items():
            demand(stmt, value == wanted, f"the names of tensors should be {wanted}, not {value}")
        demand(
            self._tree, bool(wanted) == bool(self._names), "has no names of tensors, or has some"
        )


def _constants(program: Program) -> dict[str, str]:
    """The constants of a program besides sizes and numbers."""
    texts = {"MESH": repr(whole_mesh(program))}
    if pipeline := program.pipeline:
        texts |= {"LAYERS_OF_STAGE": constants(program)["LAYERS_OF_STAGE"]}
        texts |= {
            "STAGE_TO_RANK": repr(pipeline.stage_to_rank),
            "INNER": repr((*mesh_axes(program),)),
        }
    return texts


def demand_same(actual: ast.AST, wanted: ast.AST, place: ast.AST | None = None) -> None:
    """Raises where a text is not word for word the same as in all programs, with the innermost
    line that differs.
    """
    if ast.dump(actual) == ast.dump(wanted):
        return
    place = actual if hasattr(actual, "lineno") else place
    ours, theirs = [*ast.iter_child_nodes(actual)], [*ast.iter_child_nodes(wanted)]
    if len(ours) == len(theirs) and type(actual) is type(wanted):
        for mine, other in zip(ours, theirs, strict=True):
            demand_same(mine, other, place)
    raise wrong(
        place or actual,
        f"`{_first_line(actual)}` should be `{_first_line(wanted)}`, as in all programs",
    )


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


def _template(program: Program) -> str:
    """The functions and classes of the template that are the same in all programs, or in all of
    fp16.
    """
    state = (
        "scaled_state" if any(op.kind == "loss_scale" for op in program.ops) else "training_state"
    )
    text = (folder("codegen_templates") / "dtensor.py.j2").read_text().replace("{{ state }}", state)
    definitions = (
        source.partition("\n\n\n")[0] for source in re.split(r"(?m)^(?=def |class )", text)[1:]
    )
    alone = (re.sub(r"(\n\{%.*)+\Z", "", source) for source in definitions)
    return "\n".join(source for source in alone if "{{" not in source and "{%" not in source)
