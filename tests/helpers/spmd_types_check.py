"""Runs an emitted program's step under the checker of `spmd_types`, on a fake process group.

Parameters, inputs, gradients and results get the types that the final IR gives them.

Non-goals: what a rank communicates or computes (`oracle`).
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.spmd_types_rules import METHODS, I, P, R, Swap, spmd
from scalec.compiler.ir import REPLICATED, SEQUENCE, Kind, Op, Program, Region, Type, sharded
from scalec.compiler.ops import roles
from scalec.runtime import Batch, Mesh

debug = cast(Any, dist)  # the stubs leave its levels out

KINDS = {Kind.INVARIANT: I, Kind.REPLICATED: R, Kind.PARTIAL: P}


def run(text: str, program: Program, without: str = "") -> None:
    """Type-checks `train_step` and `eval_step` of a program in strict mode, `without` the rule for
    that function.

    Raises SpmdTypeError where types do not fit, RuntimeError or AssertionError where shapes do not.
    """
    module = _module(text)
    with checking(module.PLAN.mesh) as mesh:
        step = _Step(module, program, mesh)
        vars(module).update(Swap(mesh, _kinds(step.loss_type())).names(without))
        step.check()


@contextmanager
def checking(axes: dict[str, int]) -> Iterator[Mesh]:
    """Their checker in strict mode, with shards followed dim by dim, on rank 0 of a mesh whose
    ranks are not there.
    """
    level = debug.get_debug_level()
    debug.set_debug_level(debug.DebugLevel.OFF)  # else gloo would compare what ranks do
    dist.init_process_group("fake", rank=0, world_size=prod(axes.values()), store=FakeStore())
    try:
        mesh = Mesh(axes)
        with (
            spmd.set_current_mesh(mesh.device_mesh),
            spmd.checker.typecheck(strict_mode="strict", local=False),
        ):
            yield mesh
    finally:
        dist.destroy_process_group()
        debug.set_debug_level(level)


class _Named(ast.NodeTransformer):
    """Gives `torch.zeros_like(…)` the form of a call by name, which can be bound anew; reads no
    file of names.
    """

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        function = node.func
        # types do not depend on the files beside the program
        if isinstance(function, ast.Name) and function.id == "Plan":
            node.keywords = [
                keyword for keyword in node.keywords if keyword.arg not in ("names", "predictions")
            ]
        if isinstance(function, ast.Attribute) and function.attr in METHODS:
            owner = (
                []
                if isinstance(function.value, ast.Name) and function.value.id == "torch"
                else [function.value]
            )
            return ast.Call(
                ast.Name(function.attr, ast.Load()), [*owner, *node.args], node.keywords
            )
        return node


def _module(text: str) -> ModuleType:
    tree = ast.fix_missing_locations(_Named().visit(ast.parse(text)))
    module = ModuleType("emitted")
    exec(compile(tree, "train.py", "exec"), vars(module))
    return module


class _Step:
    """A built program, its parameters and inputs typed; it stands for the state that the step
    is given.
    """

    def __init__(self, module: ModuleType, program: Program, mesh: Mesh) -> None:
        self.mesh = mesh
        self._module, self._program = module, program
        self._microbatches = next(stmt for stmt in program.region.body if isinstance(stmt, Region))
        self._uses = _uses(program)
        with spmd.no_typecheck():
            self._model, self._state = module.build(mesh)
            self._state.initialise(0)
            self._records: dict[str, Any] = self._state.state_dict()

    def loss_type(self) -> Type:
        """The type of the sum of the loss over microbatches."""
        return self._microbatches.results[0].type

    def check(self) -> None:
        """Both steps, and that what they return is whole."""
        for name, parameter in self._model.named_parameters():
            annotate(parameter, self._uses[name.split(".")[-1]], self._split(name))
        for table in self._model.buffers():
            self._annotate_positions(table)
        batch = self._batch()
        metrics = self._module.train_step(self._model, self, batch, 0.1)
        spmd.assert_type([metrics.loss, metrics.norm, metrics.tokens], I)
        metrics = self._module.eval_step(self._model, self, batch)
        spmd.assert_type([metrics.loss, metrics.tokens], I)

    def gradients(self) -> dict[str, Tensor]:
        """Flat gradients, whose types are by their rule the backward types of their parameters'."""
        flat: dict[str, Tensor] = self._state.gradients()
        for bucket in self._program.buckets:
            shards = bucket.type.axes_in(Kind.SHARDED)
            types = [_kinds(self._uses[name]) for name in bucket.params]
            assert all(type == types[0] for type in types), (
                f"{bucket.name}: parameters of several types"
            )
            duals = {axis: type.backward_type() for axis, type in types[0].items()}
            spmd.assert_type(flat[bucket.name], duals, partition_spec=_spec([shards]))
        return flat

    def update(self, lr: float, skip: Tensor, finite: Tensor, scale: Tensor | None = None) -> None:
        """Whether to step, and how far, is the same on every rank."""
        spmd.assert_type([skip, finite] if scale is None else [skip, finite, scale], I)

    def _annotate_positions(self, table: Tensor) -> None:
        """A table of cosines and sines has rows for the positions of what is rotated."""
        types = self._program.types
        rotated = next(types[op.inputs[0]] for op in self._program.ops if roles(op, types).rotated)
        axes = rotated.axes_of(SEQUENCE)
        places = {
            axis: sharded(SEQUENCE) if axis in axes else REPLICATED for axis in self.mesh.axes
        }
        of = Type(rotated.dtype, (SEQUENCE,), self._program.places(places))
        annotate(table, of, [(), axes, *[()] * (table.dim() - 2)])

    def _batch(self) -> Batch:
        """Random tokens, which serve as labels too."""
        args = {arg.value.name: arg.source for arg in self._microbatches.args}
        outer = {arg.value.name: arg.value.type for arg in self._program.region.args}
        inputs: list[Tensor] = []
        for name in ("tokens", "labels"):
            type = outer[args[name]]
            with spmd.no_typecheck():
                local = torch.randint(self._module.PLAN.vocab, self._program.local_shape(type))
            annotate(local, type, [type.axes_of(dim) for dim in type.dims])
            inputs.append(local)
        return Batch(*inputs)

    def _split(self, name: str) -> list[tuple[str, ...]]:
        """The axes that split each dim of a parameter as it is stored."""
        record = self._records[name]
        names = record.device_mesh.mesh_dim_names
        return [
            tuple(
                axis
                for axis, place in zip(names, record.placements, strict=True)
                if place.is_shard(dim)
            )
            for dim in range(record.dim())
        ]


def annotate(x: Tensor, type: Type, split: list[tuple[str, ...]]) -> None:
    """Gives a local tensor the type that the IR says, its dims split over these axes, outer
    first.
    """
    assert {axis for axes in split for axis in axes} == set(type.axes_in(Kind.SHARDED)), (
        f"{type}: split {split}"
    )
    spmd.assert_type(x, _kinds(type), partition_spec=_spec(split))


def _kinds(type: Type) -> dict[str, Any]:
    """The types on the axes of the mesh that do not shard."""
    return {
        axis: KINDS[type.placement_on(axis).kind]
        for axis in spmd.current_mesh_names() or ()
        if type.placement_on(axis).kind in KINDS
    }


def _spec(split: list[tuple[str, ...]]) -> Any:
    return spmd.PartitionSpec(*(axes or None for axes in split))


def _uses(program: Program) -> dict[str, Type]:
    """The type of each parameter as the model uses it: after the coercions of step scope."""
    types = {param.name: param.type for param in program.params}
    names = {param.name: param.name for param in program.params}
    for op in program.region.body:
        if isinstance(op, Op) and op.kind in ("coerce", "cast") and op.inputs[0] in names:
            names[op.outputs[0].name] = names[op.inputs[0]]
            types[names[op.inputs[0]]] = op.outputs[0].type
    return types
