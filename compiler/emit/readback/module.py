"""Reads the whole text: imports, classes, functions, plan.  A statement that is none of these is an error.

Purpose: what the module binds, and which reader reads what.  Non-goals: what stands inside.
"""

import ast

from ...analysis.certificate import trusted
from ...ir import Program, Region, Type, base, walk
from ..imports import IMPORTS
from .ast_matching import BUILT_IN, demand, demand_header, demand_same, wrong
from .classes import Class, Model, Place
from .declarations import has_modules, read_class
from .forward import Forward
from .kernels import kernels
from .recompute import made_again
from .schedule import constants, crossing
from .settings import check_build, check_plan, model_class
from .stage_params import read_staged_class
from .staged import StagedForward
from .step import Step
from .values import FlatParams, Seen, blocks, local
from .weights import stored

MAIN = 'if __name__ == "__main__":\n    train(PLAN, build, train_step, eval_step)'


class File:
    """Reads one text."""

    def __init__(self, program: Program, tree: ast.Module) -> None:
        self._program, self._tree = program, tree
        self._types = _types(program)
        self._modules = {function.partition(":")[0] for function in trusted(program)}
        self._same: dict[str, str] = {}
        self._bound: set[str] = set()
        self._classes: dict[str, ast.ClassDef] = {}
        self._functions: dict[str, ast.FunctionDef] = {}
        self._plan: list[ast.expr] = []
        self._constants = constants(program) | kernels(program)

    def read(self) -> int:
        """Reads everything; returns how many ops it does, which are all of the program."""
        *body, last = self._tree.body
        for stmt in body[ast.get_docstring(self._tree) is not None :]:
            self._statement(stmt)
        demand_same(last, MAIN)
        build, train, evaluate = self._headers(last)
        names = frozenset(self._bound)
        innermost = [name for name, node in self._classes.items() if not has_modules(node)]
        demand(last, {*self._constants} <= names, f"does not bind {sorted({*self._constants} - names)}")
        model = self._model(model_class(build), names)
        taken = self._steps(model, model_class(build), train, evaluate) + model.taken
        check_build(build, self._program, innermost, model.paths, self._dtype(), names)
        check_plan(self._plan[0], self._program, self._types, stored(self._program, model.paths, self._dtype()), names)
        expected = sum(1 for _ in walk(self._program.region.body))
        demand(last, taken == expected, f"does {taken} ops, not the {expected} of the IR")
        return taken

    # ---- what the module binds

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Import(names=[ast.alias(name="torch" as name, asname=None)]):
                self._bind(stmt, name)
            case ast.Import(names=[ast.alias(name=name, asname=None)]) if name in self._modules:
                self._bind(stmt, name)
            case ast.ImportFrom():
                self._import(stmt)
            case ast.ClassDef(name=name):
                self._bind(stmt, name)
                self._classes[name] = stmt
            case ast.FunctionDef(name=name):
                self._bind(stmt, name)
                self._functions[name] = stmt
            case ast.Assign(targets=[ast.Name(id=name)]) if name in self._constants:
                self._constant(stmt, name)
            case ast.Assign(targets=[ast.Name(id="PLAN")]):
                self._bind(stmt, "PLAN")
                self._plan.append(stmt.value)
            case _:
                raise wrong(stmt, f"`{ast.unparse(stmt)}` is no part of a program")

    def _bind(self, node: ast.AST, name: str) -> None:
        demand(node, name not in self._bound, f"binds `{name}` twice")
        demand(node, name not in BUILT_IN, f"hides Python's `{name}`")
        self._bound.add(name)

    def _constant(self, stmt: ast.Assign, name: str) -> None:
        demand(stmt, ast.dump(stmt.value) == ast.dump(self._constants[name]), f"`{name}` is not the IR's")
        read = {node.id for node in ast.walk(stmt.value) if isinstance(node, ast.Name)}
        demand(stmt, read <= {*self._bound, *BUILT_IN}, f"reads {sorted(read)} before all are bound")
        self._bind(stmt, name)

    def _import(self, stmt: ast.ImportFrom) -> None:
        allowed = IMPORTS.get(stmt.module or "", ())
        for alias in stmt.names:
            demand(
                stmt,
                alias.name in allowed and not alias.asname and not stmt.level,
                f"imports {alias.name} of {stmt.module}",
            )
            self._bind(stmt, alias.name)

    def _headers(self, node: ast.AST) -> tuple[ast.FunctionDef, ast.FunctionDef, ast.FunctionDef]:
        """The three functions, and that the rest that the main line needs is there."""
        demand(
            node, sorted(self._functions) == ["build", "eval_step", "train_step"], f"defines {sorted(self._functions)}"
        )
        demand(node, {"PLAN", "train"} <= self._bound, "has no plan, or does not import `train`")
        build, train, evaluate = (self._functions[name] for name in ("build", "train_step", "eval_step"))
        demand_header(build, "mesh: Mesh", "tuple[nn.Module, TrainState]")
        demand_header(train, "model: nn.Module, state: TrainState, batch: Batch, lr: float", "Metrics")
        demand_header(evaluate, "model: nn.Module, state: TrainState, batch: Batch", "Metrics", "torch.no_grad()")
        demand(
            node,
            {"Mesh", "TrainState", "Batch", "Metrics", "Tensor", "nn", "torch"} <= self._bound,
            "annotates with unknown names",
        )
        return build, train, evaluate

    # ---- what the functions do

    def _model(self, top: str, names: frozenset[str]) -> Model:
        _, forward, backward = blocks(self._program)
        classes = {name: self._class(node, name == top, names) for name, node in self._classes.items()}
        return Model(self._program, self._types, *made_again(forward, backward), names, classes, self._same)

    def _class(self, node: ast.ClassDef, top: bool, names: frozenset[str]) -> Class:
        if top and self._program.pipeline:
            return read_staged_class(node, names, [*map(len, crossing(self._program, self._program.pipeline))])
        return read_class(node, names)

    def _steps(self, model: Model, top: str, train: ast.FunctionDef, evaluate: ast.FunctionDef) -> int:
        """Reads both steps, and the model as they call it; returns the ops of training but for the model's."""
        steps = [Step(self._program, self._types, self._same, model.names, node) for node in (train, evaluate)]
        taken, _ = [step.read() for step in steps]
        demand(evaluate, steps[0].given == steps[1].given, "calls the model otherwise than training does")
        demand(train, top in model.classes, f"`{top}` is no class")
        region, forward, _ = blocks(self._program)
        inputs: dict[str, Seen] = {base(arg.value.name): local(arg.value.name, self._types) for arg in region.args}
        inputs |= {"flat_params": FlatParams()} if any(bucket.turns for bucket in self._program.buckets) else {}
        demand(train, sorted(steps[0].given) == sorted(inputs), f"gives the model {steps[0].given}")
        given = [inputs[name] for name in steps[0].given]
        results, pipeline = [region.yields[0].name], self._program.pipeline
        whole = (model, top, forward, results, given)
        (StagedForward(*whole, pipeline) if pipeline else Forward(*whole, Place())).read()
        demand(train, not model.classes, f"nothing uses {sorted(model.classes)}")
        return taken

    def _dtype(self) -> str:
        """The element type of parameters as the model uses them, one for all."""
        params = {p.name for p in self._program.params}
        ops = walk(blocks(self._program)[1].body)
        (dtype,) = {self._types[n].dtype for op in ops for n in op.inputs if self._same.get(n, n) in params}
        return dtype


def _types(program: Program) -> dict[str, Type]:
    """The types of all values."""
    types = {p.name: p.type for p in program.params}
    pending = [program.region]
    while pending:
        region = pending.pop()
        types |= {arg.value.name: arg.value.type for arg in region.args} | {v.name: v.type for v in region.results}
        for stmt in region.body:
            if isinstance(stmt, Region):
                pending.append(stmt)
            else:
                types |= {value.name: value.type for value in stmt.outputs}
    return types
