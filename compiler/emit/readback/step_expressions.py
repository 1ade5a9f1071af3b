"""Reads the expressions of emitted `train_step` and `eval_step`: counts, sums, reductions, and what the state gives.

Purpose: takes the ops of the step that an expression does, and follows what each name holds.
Non-goals: statements (`step`), and which ops the state's own calls stand for (`state`).
"""

import ast

from attrs import Factory, define

from ...ir import INVARIANT, PARTIAL, REPLICATED, Attr, Placement, Program, Type, sharded, walk
from .ast_matching import Names, Ops, axes_of, demand, demand_same, keywords, literal, same, terms, wrong
from .state import Reduction, Sent, TrainState
from .step_values import FLATS, GRADIENTS, MESH, REDUCTIONS, WEIGHTS, Mark, Seen, Zero
from .values import Axes


@define
class Scope:
    """What the expressions of a step are read with; `labels` are those of all microbatches, which may have `ran`."""

    program: Program
    types: dict[str, Type]
    names: Names
    ops: Ops
    state: TrainState
    labels: str
    trains: bool
    env: dict[str, Seen] = Factory(dict[str, Seen])
    unread: set[str] = Factory(set[str])  # groups, zeros and gradients that are not used yet
    ran: bool = False

    # ---- buckets

    def _gradients(self, node: ast.expr) -> Mark:
        demand_same(node, "state.gradients()")
        demand(node, self.ran, "takes the gradients before the microbatches")
        self.state.take_gradients(node)
        return GRADIENTS

    def _parameters(self, node: ast.expr) -> Mark:
        demand_same(node, "state.weights()")
        demand(node, not self.ran, "takes the parameters after the microbatches")
        self.state.take_weights(node)
        return WEIGHTS

    def _flats(self, node: ast.expr) -> Mark:
        """The buffers of turns, which in training count the microbatches, or of chunks."""
        counts = self.trains and not self.program.pipeline
        demand_same(node, "state.flat_params(len(batch))" if counts else "state.flat_params()")
        demand(node, not self.ran, "takes the turns' buffers after the microbatches")
        self.state.take_flats(node)
        return FLATS

    def gather(self, call: ast.Call, axes: ast.expr, flat_params: list[ast.expr]) -> None:
        """`unshard_ahead(axes, flat_params["…"], …)`."""
        self.names.demand(call, "unshard_ahead")
        keywords(call)
        demand(call, not self.ran, "gathers parameters after the microbatches")
        names = [self._flats_of(node) for node in flat_params]
        self.state.gather(call, names, self._axes(axes))

    def _flats_of(self, node: ast.expr) -> str:
        """The bucket of `flat_params["…"]`."""
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(bucket))) if (
                self.env.get(name) == FLATS
            ):
                return bucket
            case _:
                raise wrong(node, f"`{ast.unparse(node)}` are no buffers of turns")

    def reductions(self, node: ast.List) -> Mark:
        """`[stage_grad_reduction(flat_params["…"], scatter=axes, add=axes, dtype=…), …]`: how chunks are reduced."""
        demand(node, not self.ran, "reduces after the microbatches")
        found = [self._reduction(each) for each in node.elts]
        wanted = self.state.reductions()
        demand(node, found == wanted, f"reduces {[*map(str, found)]}, not {[*map(str, wanted)]}")
        return REDUCTIONS

    def _reduction(self, node: ast.expr) -> Reduction:
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "stage_grad_reduction"
        ):
            raise wrong(node, f"`{ast.unparse(node)}` is no reduction")
        self.names.demand(node, "stage_grad_reduction")
        demand(node, len(node.args) == 1, "takes the chunks of one bucket")
        said = {keyword.arg or "": keyword.value for keyword in node.keywords}
        sent = self.names.dtype(said.pop("dtype")) if "dtype" in said else ""
        return Reduction(self._flats_of(node.args[0]), {word: self._axes(axes) for word, axes in said.items()}, sent)

    # ---- expressions

    def value(self, node: ast.expr) -> Seen:
        match node:
            case ast.Name(id=name) if name in self.env:
                self.unread.discard(name)
                return self.env[name]
            case ast.Subscript(value=base, slice=ast.Constant(value=str(bucket))):
                of = self.value(base)
                demand(node, of in (GRADIENTS, WEIGHTS), f"`{ast.unparse(base)}` are no buckets")
                held = self.state.gradients if of == GRADIENTS else self.state.weights
                demand(node, bucket in held, f"there is no bucket `{bucket}`")
                return held[bucket]
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                return self.take(node, "mul", [left, right])
            case ast.BinOp(op=ast.Div(), left=ast.Call(func=ast.Attribute(attr="sqrt", value=base)) as root):
                demand_same(root, f"({ast.unparse(base)}).sqrt()")
                return self.take(node, "unscaled_norm", [node.right, *self._summands(base)])
            case ast.BinOp(op=ast.Div(), left=left, right=scale):
                clip = self.unclipped(left) if same(left, "1") else self.tensor(left)
                return self.ops.take(node, "unscaled", [clip, self.tensor(scale)], {}).outputs[0].name
            case ast.Call(func=ast.Name(id=name)):
                self.names.demand(node, name)
                return self._call(node, name)
            case ast.Call(func=ast.Attribute(value=base, attr=name)):
                return self._method(node, base, name)
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")

    def _summands(self, node: ast.expr) -> list[ast.expr]:
        """The operands of a sum without differences."""
        found = terms(node)
        demand(node, not any(away for _, away in found), "takes a difference")
        return [operand for operand, _ in found]

    def tensor(self, node: ast.expr) -> str:
        value = self.value(node)
        if not isinstance(value, str):
            raise wrong(node, f"`{ast.unparse(node)}` is no value of the step")
        return value

    def unclipped(self, node: ast.AST) -> str:
        """What the IR scales gradients by where the plan does not clip them: nothing to do."""
        norms = ("grad_norm", "unscaled_norm")
        (norm,) = (op.outputs[0].name for op in walk(self.program.region.body) if op.kind in norms)
        return self.ops.take(node, "clip_scale", [norm], {"max": 0.0}).outputs[0].name

    def take(self, node: ast.expr, kind: str, operands: list[ast.expr], **attrs: Attr) -> str:
        """The value of an op that an expression does with its operands."""
        op = self.ops.take(node, kind, [self.tensor(operand) for operand in operands], attrs)
        return self.ops.first(op.outputs[0].name)

    def _call(self, node: ast.Call, function: str) -> str:
        reduces = function in ("all_reduce_", "reduce_scatter_")
        once = function == "sum_squares" and bool(node.keywords)
        keywords(node, *(("dtype",) if reduces and node.keywords else ("once",) if once else ()))
        match function, node.args:
            case "count_valid", [labels]:
                demand_same(labels, "batch.labels")
                op = self.ops.take(node, "count_valid", [self.labels], {})
                return self.ops.first(op.outputs[0].name)
            case "all_reduce_", [operand, axes]:
                return self._coerce(node, operand, axes, PARTIAL, INVARIANT)
            case "reduce_scatter_", [operand, axes]:
                return self._coerce(node, operand, axes, PARTIAL, self._shard(operand))
            case "all_gather_", [operand, axes]:
                demand(node, not self.ran, "gathers parameters after the microbatches")
                return self._coerce(node, operand, axes, self._shard(operand), REPLICATED)
            case "sum_squares", operands:
                return self._squares(node, operands)
            case "clip_scale", [norm, limit]:
                largest = literal(limit)
                demand(node, isinstance(largest, float) and largest > 0, "a limit is a number")
                return self.take(node, "clip_scale", [norm], max=float(str(largest)))
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")

    def _squares(self, node: ast.Call, operands: list[ast.expr]) -> str:
        """With a pipeline, of what the ranks of a stage hold; of what several hold, on the first."""
        pipeline = self.program.pipeline
        attrs: dict[str, Attr] = {"stages": pipeline.axis} if pipeline else {}
        if node.keywords:
            group = self._group(node.keywords[0].value)
            demand(node, pipeline is not None and group.names == (pipeline.axis,), "counts once what is no stage's")
            attrs["once"] = group.among or tuple(map(str, range(self.program.degree(group.names))))
        return self.take(node, "sum_squares", [self._each(operand) for operand in operands], **attrs)

    def _each(self, node: ast.expr) -> ast.expr:
        """`*gradients["…"]` of a bucket that may have several chunks, as if it had one."""
        inner = node.value if isinstance(node, ast.Starred) else node
        match inner:
            case ast.Subscript(slice=ast.Constant(value=str(bucket))) if bucket in self.state.gradients:
                chunks = self.state.has_chunks(self.program.bucket(bucket))
                demand(
                    node, isinstance(node, ast.Starred) == chunks, f"takes `{bucket}` {'whole' if chunks else 'apart'}"
                )
            case _:
                demand(node, inner is node, f"`{ast.unparse(node)}` are no chunks")
        return inner

    def _shard(self, operand: ast.expr) -> Placement:
        """A bucket's part, whose flat dim is its only one."""
        dims = self.types[self.tensor(operand)].dims
        demand(operand, len(dims) == 1, f"`{ast.unparse(operand)}` is no flat buffer")
        return sharded(*dims)

    def _coerce(self, node: ast.Call, operand: ast.expr, axes: ast.expr, source: Placement, target: Placement) -> str:
        """In place: whatever held the value holds the result from now on."""
        before, group = self.tensor(operand), self._group(axes)
        kept = self.types[before].dtype
        sent = self.names.dtype(node.keywords[0].value) if node.keywords else kept
        attrs: dict[str, Attr] = {"axes": group.names, "from": source, "to": target}
        attrs |= {"among": group.among} if group.among else {}
        after = self.state.coerce(node, before, attrs, Sent(sent, kept))
        self.env = {name: after if value == before else value for name, value in self.env.items()}
        self.state.move(before, after)
        return after

    def _axes(self, node: ast.expr) -> tuple[str, ...]:
        """The axes of a group of all ranks over them."""
        group = self._group(node)
        demand(node, not group.among, f"`{ast.unparse(node)}` are some ranks of an axis")
        return group.names

    def _group(self, node: ast.expr) -> Axes:
        group = self.value(node)
        if not isinstance(group, Axes):
            raise wrong(node, f"`{ast.unparse(node)}` is no axis")
        return group

    def _method(self, node: ast.Call, base: ast.expr, name: str) -> Seen:
        match ast.unparse(node.func), name:
            case "mesh.axis", _:
                demand(node, self.env.get("mesh") == MESH, "there is no mesh yet")
                return Axes(axes_of(node))
            case "mesh.among", _:
                demand(node, self.env.get("mesh") == MESH, "there is no mesh yet")
                return _among(node)
            case "state.weights", _:
                return self._parameters(node)
            case "state.flat_params", _:
                return self._flats(node)
            case "state.gradients", _ if self.trains:
                return self._gradients(node)
            case "state.loss_scale", _ if self.trains:
                demand_same(node, "state.loss_scale()")
                return self.take(node, "loss_scale", [])
            case "torch.zeros_like", _:
                return Zero(self.types[self._like(node)])
            case _, "sqrt":
                demand_same(node, f"({ast.unparse(base)}).sqrt()")
                return self.take(node, "grad_norm", self._summands(base))
            case _, "reciprocal":
                return self._reciprocal(node)
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")

    def _like(self, node: ast.Call) -> str:
        self.names.demand(node, "torch")
        demand(node, len(node.args) == 1 and not node.keywords, "takes one tensor")
        return self.tensor(node.args[0])

    def _reciprocal(self, node: ast.Call) -> str:
        match node.func:
            case ast.Attribute(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Call(func=ast.Attribute(value=count)), attr="to"),
                    args=[ast.Attribute() as word],
                )
            ):
                demand_same(node, f"({ast.unparse(count)}).clamp(min=1).to({ast.unparse(word)}).reciprocal()")
                return self.take(node, "reciprocal", [count], dtype=self.names.dtype(word))
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")


def _among(node: ast.Call) -> Axes:
    """`mesh.among("pp", 0, 3)`."""
    axis, *ranks = [literal(argument) for argument in node.args]
    demand_same(node, f"mesh.among({', '.join(map(repr, [axis, *ranks]))})")
    return Axes((str(axis),), tuple(map(str, ranks)))
