"""Reads emitted `train_step` and `eval_step`: statements at the scope of the step, matched to its ops and regions.

Purpose: what is counted, reduced and updated, over which axes and in which order.  Non-goals: the model (`forward`).
"""

import ast

from attrs import frozen

from ...ir import INVARIANT, PARTIAL, REPLICATED, Attr, Op, Placement, Program, Type, base, sharded, walk
from ...layout import shard_axes
from ...leaves import leaves
from ...placements import coercion_of, ends
from .text import DTYPES, Names, Ops, axes_of, demand, demand_same, keywords, literal, statements, targets, terms, wrong
from .values import Axes, blocks, needed

INPUTS = ("tokens", "labels", "documents", "draws")
"""What `batch.microbatches()` gives of each microbatch, as far as the model takes it, in the runtime's order."""


GIVEN = {"model", "state", "mesh", "batch", "lr"}
"""Names that mean the same in all of the functions."""


@frozen
class Zero:
    """`torch.zeros_like(…)`, to which a sum over microbatches is added."""

    type: Type


@frozen
class Mark:
    """The mesh, or the flat gradients or parameters by bucket."""

    of: str


MESH, GRADIENTS, WEIGHTS = Mark("mesh"), Mark("gradients"), Mark("weights")

Seen = str | Axes | Zero | Mark
"""A value of the IR, or what is none."""


def _weights(ops: list[Op]) -> set[str]:
    """What is made on the way from parameters, flat, to an `unpack`."""
    names: set[str] = set()
    for op in reversed(ops):
        if op.kind == "unpack" or names & {value.name for value in op.outputs}:
            names.update(op.inputs)
    return names


class Step:
    """Reads `train_step`, or `eval_step`, which does what loss and count need."""

    def __init__(
        self,
        program: Program,
        types: dict[str, Type],
        same: dict[str, str],
        names: frozenset[str],
        node: ast.FunctionDef,
    ) -> None:
        self._program, self._types, self._same, self._node = program, types, same, node
        self._names, self._trains = Names.of(node, names), node.name == "train_step"
        self._region, _, self._backward = blocks(program)
        metrics = ("loss", "norm", "tokens")
        self._returns = {key: end.name for key, end in zip(metrics, program.region.yields, strict=False)}
        if not self._trains:
            del self._returns["norm"]
        ops = needed(program, None if self._trains else set(self._returns.values()))
        self._weights = _weights(ops)
        self._unpacked = [op for op in ops if op.kind == "unpack"]
        same.update({value.name: leaves(program)[value.name] for op in self._unpacked for value in op.outputs})
        self._ops = Ops([op for op in ops if op.kind != "unpack"], same, self._is_leaf)
        self._order = [op for op in ops if op.kind == "coerce" and coercion_of(op).collective]
        self._env: dict[str, Seen] = {}
        self._unread: set[str] = set()  # groups, zeros and gradients that are not used yet
        self._flat: dict[str, str] = {}  # bucket → the value that its gradient holds
        self._held: dict[str, str] = {}  # bucket → the value that its parameters hold
        self._ran = False
        self.given: tuple[str, ...] = ()  # the inputs, in the order in which the model takes them

    def _is_leaf(self, op: Op) -> bool:
        """Whether an op is a parameter's on its way to its uses, and nothing at run time or the state's own copy."""
        source = self._same.get(op.inputs[0], op.inputs[0])
        own = op.outputs[0].name in self._weights
        free = op.kind == "cast" or (op.kind == "coerce" and ends(op)[0] == INVARIANT)
        return free and (own or source in {p.name for p in self._program.params})

    def read(self) -> int:
        """Reads all statements; returns how many ops they do, but for those of the model's forward."""
        *body, last = statements(self._node)
        for stmt in body:
            self._statement(stmt)
        self._return(last)
        demand(self._node, self._ran and not self._unread, f"runs no microbatch, or never uses {sorted(self._unread)}")
        done = [op for op in self._ops.done if op in self._order]
        demand(self._node, done == self._order, f"reduces {', '.join(op.inputs[0] for op in done)} in this order")
        return self._ops.finish(self._node) + len(self._unpacked) + sum(1 for _ in walk(self._backward.body))

    # ---- statements

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Assign(targets=[ast.Name(id="mesh")]) if "mesh" not in self._env:
                demand_same(stmt, "mesh = state.mesh")
                self._env["mesh"] = MESH
            case ast.Assign(targets=[ast.Tuple() as names], value=ast.Tuple(elts=values)):
                demand(stmt, len(names.elts) == len(values), "assigns unevenly")
                self._bind(names, [self._value(value) for value in values])
            case ast.Assign(targets=[ast.Name() as name], value=value):
                self._bind(name, [self._value(value)])
            case ast.Expr(value=ast.Call(func=ast.Name(id="all_reduce_" | "all_gather_")) as call):
                self._value(call)
            case ast.Assign(targets=[ast.Subscript() as own], value=ast.Call(args=[same, _]) as call):
                demand_same(same, ast.unparse(own))
                self._value(call)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="update")) as call) if self._trains:
                self._update(call)
            case ast.For():
                self._microbatches(stmt)
            case _:
                raise wrong(stmt, f"nothing in the IR does `{ast.unparse(stmt)}`")

    def _bind(self, target: ast.expr, values: list[Seen]) -> None:
        names = targets(target)
        demand(target, not (GIVEN | self._unread) & set(names), f"binds {names} anew")
        self._unread |= {name for name, value in zip(names, values, strict=True) if not isinstance(value, str)}
        self._env.update(zip(names, values, strict=True))

    def _return(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Return(value=ast.Call(func=ast.Name(id="Metrics"), args=[]) as call):
                self._names.demand(stmt, "Metrics")
                for key, node in keywords(call, *self._returns).items():
                    wanted = self._ops.first(self._returns[key])
                    demand(node, self._value(node) == wanted, f"`{key}` is not {wanted}")
            case _:
                raise wrong(stmt, "does not return metrics by name")

    # ---- microbatches

    def _microbatches(self, stmt: ast.For) -> None:
        """The loop that runs forward, and in training backward, of each microbatch, and adds up the loss."""
        demand(stmt, not self._ran, "runs the microbatches twice")
        inputs = targets(stmt.target)
        total, part, args, seed = self._parts(stmt)
        body = f"{total} += model({args})"
        if self._trains:
            body = f"{part} = model({args})\n    ({part} * {seed}).backward()\n    {total} += {part}.detach()"
            self._seed(stmt, seed)
        demand_same(stmt, f"for {', '.join(inputs)} in batch.microbatches():\n    {body}")
        taken = {base(arg.value.name) for arg in self._region.args}
        known = [name for name in INPUTS if name in taken]
        demand(stmt, len(inputs) == len(known), f"{len(known)} inputs, not {len(inputs)}")
        by_name = dict(zip(inputs, known, strict=True))
        if not self._trains:  # nothing is dropped
            by_name = {name: given for name, given in by_name.items() if given != "draws"} | {"None": "draws"}
        self.given = tuple(by_name.get(arg, "") for arg in args.split(", "))
        names = [name for name in (*inputs, part, total, seed) if name]
        demand(stmt, len({*names, *GIVEN}) == len(names) + len(GIVEN), "uses a name twice")
        self._sum(stmt, total)
        self._ran = True
        self._env = {name: value for name, value in self._env.items() if name not in (*inputs, part)}

    def _parts(self, stmt: ast.For) -> tuple[str, str, str, str]:
        """The names of the sum and of one part, the model's arguments, and the gradient from which backward begins."""
        match stmt.body:
            case [
                ast.Assign(targets=[ast.Name(id=part)], value=ast.Call(args=args)),
                ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.BinOp(right=ast.Name(id=seed))))),
                ast.AugAssign(target=ast.Name(id=total)),
            ] if self._trains:
                return total, part, ", ".join(map(ast.unparse, args)), seed
            case [ast.AugAssign(target=ast.Name(id=total), value=ast.Call(args=args))] if not self._trains:
                return total, "", ", ".join(map(ast.unparse, args)), ""
            case _:
                raise wrong(stmt, "a microbatch is other than forward, backward and sum")

    def _seed(self, stmt: ast.stmt, name: str) -> None:
        """The one value of the step, but for leaves, that the backward block reads is what backward is given."""
        made = {self._ops.first(v.name) for op in self._program.region.body if isinstance(op, Op) for v in op.outputs}
        read = {self._ops.first(name) for op in walk(self._backward.body) for name in op.inputs} & made
        seeds = read - {p.name for p in self._program.params}
        demand(stmt, {self._env.get(name)} == seeds, f"backward begins from {name}, not {', '.join(seeds)}")

    def _sum(self, stmt: ast.stmt, name: str) -> None:
        zero, loss = self._env.get(name), self._region.results[0]
        like = (zero.type.dtype, zero.type.dims) if isinstance(zero, Zero) else None
        demand(stmt, like == (loss.type.dtype, loss.type.dims), f"`{name}` does not begin as a zero of the loss' kind")
        self._unread.discard(name)
        self._env[name] = loss.name

    # ---- the update

    def _update(self, call: ast.Call) -> None:
        """One call for the updates of all buckets."""
        clips = bool(self._program.train.optimizer.clip)
        given = keywords(call, *(("scale", "skip") if clips else ("skip",)))
        arguments = [f"{name}={ast.unparse(given[name])}" for name in given]
        demand_same(call, f"state.update({', '.join(['lr', *arguments])})")
        scale = self._tensor(given["scale"]) if clips else self._unclipped(call)
        skip = given["skip"]
        count = skip.left if isinstance(skip, ast.Compare) else skip
        demand_same(skip, f"{ast.unparse(count)} == 0")
        for bucket in self._program.buckets:
            inputs = [self._flat.get(bucket.name, ""), scale, self._tensor(count), *bucket.params]
            self._ops.take(call, "update", inputs, {"bucket": bucket.name})

    def _unclipped(self, node: ast.AST) -> str:
        """What the IR scales gradients by where the plan does not clip them: nothing to do."""
        (norm,) = (op.outputs[0].name for op in walk(self._program.region.body) if op.kind == "grad_norm")
        return self._ops.take(node, "clip_scale", [norm], {"max": 0.0}).outputs[0].name

    def _gradients(self, node: ast.AST) -> Mark:
        """The sums over microbatches of all gradients, flat."""
        demand(node, self._ran and not self._flat, "takes the gradients before the microbatches, or twice")
        of = {p.name: value.name for p, value in zip(self._program.params, self._region.results[1:], strict=True)}
        for bucket in self._program.buckets:
            (dim,) = bucket.type.dims
            op = self._ops.take(node, "pack", [of[name] for name in bucket.params], {"dim": dim})
            self._flat[bucket.name] = op.outputs[0].name
        return GRADIENTS

    def _parameters(self, node: ast.AST) -> Mark:
        """The flat parameters of buckets that ranks share out: of each, what this rank holds."""
        demand(node, not self._ran and not self._held, "takes the parameters after the microbatches, or twice")
        for bucket in self._program.buckets:
            if shard_axes(self._program, bucket):
                op = self._ops.take(node, "pack", bucket.params, {"dim": bucket.dim})
                self._held[bucket.name] = self._ops.first(op.outputs[0].name)
        return WEIGHTS

    # ---- expressions

    def _value(self, node: ast.expr) -> Seen:
        match node:
            case ast.Name(id=name) if name in self._env:
                self._unread.discard(name)
                return self._env[name]
            case ast.Subscript(value=base, slice=ast.Constant(value=str(bucket))):
                of = self._value(base)
                demand(node, of in (GRADIENTS, WEIGHTS), f"`{ast.unparse(base)}` are no buckets")
                held = self._flat if of == GRADIENTS else self._held
                demand(node, bucket in held, f"there is no bucket `{bucket}`")
                return held[bucket]
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                return self._take(node, "mul", [left, right])
            case ast.Call(func=ast.Name(id=name)):
                self._names.demand(node, name)
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

    def _tensor(self, node: ast.expr) -> str:
        value = self._value(node)
        if not isinstance(value, str):
            raise wrong(node, f"`{ast.unparse(node)}` is no value of the step")
        return value

    def _take(self, node: ast.expr, kind: str, operands: list[ast.expr], **attrs: Attr) -> str:
        op = self._ops.take(node, kind, [self._tensor(operand) for operand in operands], attrs)
        return self._ops.first(op.outputs[0].name)

    def _call(self, node: ast.Call, function: str) -> str:
        keywords(node)
        match function, node.args:
            case "count_valid", [labels]:
                demand_same(labels, f"batch.{INPUTS[1]}")
                op = self._ops.take(node, "count_valid", [self._labels()], {})
                return self._ops.first(op.outputs[0].name)
            case "all_reduce_", [operand, axes]:
                return self._coerce(node, operand, axes, PARTIAL, INVARIANT)
            case "reduce_scatter_", [operand, axes]:
                return self._coerce(node, operand, axes, PARTIAL, self._shard(operand))
            case "all_gather_", [operand, axes]:
                return self._coerce(node, operand, axes, self._shard(operand), REPLICATED)
            case "sum_squares", operands:
                return self._take(node, "sum_squares", operands)
            case "clip_scale", [norm, limit]:
                largest = literal(limit)
                demand(node, isinstance(largest, float) and largest > 0, "a limit is a number")
                return self._take(node, "clip_scale", [norm], max=float(str(largest)))
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")

    def _labels(self) -> str:
        """All microbatches' labels."""
        return next(arg.source for arg in self._region.args if arg.value.name.split(".")[0] == INPUTS[1])

    def _shard(self, operand: ast.expr) -> Placement:
        """A bucket's part, whose flat dim is its only one."""
        return sharded(*self._types[self._tensor(operand)].dims)

    def _coerce(self, node: ast.Call, operand: ast.expr, axes: ast.expr, source: Placement, target: Placement) -> str:
        """In place: whatever held the value holds the result from now on."""
        before, group = self._tensor(operand), self._value(axes)
        if not isinstance(group, Axes):
            raise wrong(axes, f"`{ast.unparse(axes)}` is no axis")
        op = self._ops.take(node, "coerce", [before], {"axes": group.names, "from": source, "to": target})
        after = self._ops.first(op.outputs[0].name)
        self._env = {name: after if value == before else value for name, value in self._env.items()}
        self._flat = {name: after if value == before else value for name, value in self._flat.items()}
        self._held = {name: after if value == before else value for name, value in self._held.items()}
        return after

    def _method(self, node: ast.Call, base: ast.expr, name: str) -> Seen:
        match ast.unparse(node.func), name:
            case "mesh.axis", _:
                demand(node, self._env.get("mesh") == MESH, "there is no mesh yet")
                return Axes(axes_of(node))
            case "state.weights", _:
                demand_same(node, "state.weights()")
                return self._parameters(node)
            case "state.gradients", _ if self._trains:
                demand_same(node, "state.gradients()")
                return self._gradients(node)
            case "torch.zeros_like", _:
                return Zero(self._types[self._like(node)])
            case _, "sqrt":
                demand_same(node, f"({ast.unparse(base)}).sqrt()")
                return self._take(node, "grad_norm", self._summands(base))
            case _, "reciprocal":
                return self._reciprocal(node)
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")

    def _like(self, node: ast.Call) -> str:
        self._names.demand(node, "torch")
        demand(node, len(node.args) == 1 and not node.keywords, "takes one tensor")
        return self._tensor(node.args[0])

    def _reciprocal(self, node: ast.Call) -> str:
        match node.func:
            case ast.Attribute(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Call(func=ast.Attribute(value=count)), attr="to"),
                    args=[ast.Attribute(attr=word)],
                )
            ):
                demand_same(node, f"({ast.unparse(count)}).clamp(min=1).to(torch.{word}).reciprocal()")
                self._names.demand(node, "torch")
                dtype = next((name for name, known in DTYPES.items() if known == f"torch.{word}"), "")
                return self._take(node, "reciprocal", [count], dtype=dtype)
            case _:
                raise wrong(node, f"nothing in the IR does `{ast.unparse(node)}`")
