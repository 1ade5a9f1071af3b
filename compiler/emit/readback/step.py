"""Reads emitted `train_step` and `eval_step`: statements at the scope of the step, matched to its ops and regions.

Purpose: what is counted, reduced and updated, over which axes and in which order.  Non-goals: the model (`forward`).
"""

import ast
from collections.abc import Iterator

from ...analysis.param_uses import leaves
from ...ir import INVARIANT, Op, Program, Region, Type, base, walk
from ...ir.placements import coercion_of, ends
from .ast_matching import Names, Ops, demand, demand_same, keywords, statements, targets, wrong
from .state import TrainState
from .step_expressions import Scope
from .step_values import FLATS, MESH, REDUCTIONS, Mark, Seen, Zero
from .values import blocks, needed

INPUTS = ("tokens", "labels", "documents", "draws")
"""What `batch.microbatches()` gives of each microbatch, as far as the model takes it, in the runtime's order."""


GIVEN = {"model", "state", "mesh", "batch", "lr"}
"""Names that mean the same in all of the functions."""


def _weights(ops: list[Op], forward: Region) -> set[str]:
    """What is made on the way from parameters to an `unpack` or, flat, to the turns that gather it."""
    names = set(_sliced(forward))
    for op in reversed(ops):
        if op.kind == "unpack" or names & {value.name for value in op.outputs}:
            names.update(op.inputs)
    return names


def _sliced(region: Region) -> Iterator[str]:
    """What enters the repeats of a region."""
    for inner in region.body:
        if isinstance(inner, Region):
            yield from (arg.source for arg in inner.args)
            yield from _sliced(inner)


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
        self._program, self._same, self._node, self._trains = program, same, node, node.name == "train_step"
        self._region, forward, self._backward = blocks(program)
        self._scale = next((op.outputs[0].name for op in walk(program.region.body) if op.kind == "loss_scale"), "")
        metrics = ("loss", "norm", "tokens")
        self._returns = {key: end.name for key, end in zip(metrics, program.region.yields, strict=False)}
        if not self._trains:
            del self._returns["norm"]
        elif self._scale:
            self._returns["loss_scale"] = self._scale
        ops = needed(program, None if self._trains else set(self._returns.values()))
        self._weights = _weights(ops, forward)
        self._unpacked = [op for op in ops if op.kind == "unpack"]
        same.update({value.name: leaves(program)[value.name] for op in self._unpacked for value in op.outputs})
        self._ops = Ops([op for op in ops if op.kind != "unpack"], same, self._is_leaf)
        self._order = [op for op in ops if op.kind == "coerce" and coercion_of(op).collective]
        labels = next(arg.source for arg in self._region.args if base(arg.value.name) == INPUTS[1])
        state = TrainState(program, self._ops)
        self._scope = Scope(program, types, Names.of(node, names), self._ops, state, labels, self._trains)
        self.given: tuple[str, ...] = ()  # the inputs, in the order in which the model takes them

    def _is_leaf(self, op: Op) -> bool:
        """Whether an op is a parameter's on its way to its uses, and nothing at run time or the state's own copy."""
        free = op.kind == "cast" or (op.kind == "coerce" and ends(op)[0] == INVARIANT)
        if not free or op.outputs[0].name in self._weights:
            return free
        return self._same.get(op.inputs[0], op.inputs[0]) in {p.name for p in self._program.params}

    def read(self) -> int:
        """Reads all statements; returns how many ops they do, but for those of the model's forward."""
        *body, last = statements(self._node)
        for stmt in body:
            self._statement(stmt)
        self._return(last)
        demand(
            self._node,
            self._scope.ran and not self._scope.unread,
            f"runs no microbatch, or never uses {sorted(self._scope.unread)}",
        )
        done = [op for op in self._ops.done if op in self._order]
        demand(self._node, done == self._order, f"reduces {', '.join(op.inputs[0] for op in done)} in this order")
        return self._ops.finish(self._node) + len(self._unpacked) + sum(1 for _ in walk(self._backward.body))

    # ---- statements

    def _statement(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Assign(targets=[ast.Name(id="mesh")]) if "mesh" not in self._scope.env:
                demand_same(stmt, "mesh = state.mesh")
                self._scope.env["mesh"] = MESH
            case ast.Assign(targets=[ast.Tuple() as names], value=ast.Tuple(elts=values)):
                demand(stmt, len(names.elts) == len(values), "assigns unevenly")
                self._bind(names, [self._scope.value(value) for value in values])
            case ast.Assign(
                targets=[ast.Name(id=loss)], value=ast.Call(func=ast.Attribute(value=ast.Name(id="PIPELINE"))) as call
            ):
                self._rows(loss, call)
            case ast.Assign(targets=[ast.Name() as name], value=ast.List() as list) if self._trains:
                self._bind(name, [self._scope.reductions(list)])
            case ast.Assign(targets=[ast.Name() as name], value=value):
                self._bind(name, [self._scope.value(value)])
            case ast.Expr(value=ast.Call(func=ast.Name(id="all_reduce_" | "all_gather_")) as call):
                self._scope.value(call)
            case ast.Expr(value=ast.Call(func=ast.Name(id="unshard_ahead"), args=[axes, *flat_params]) as call):
                self._scope.gather(call, axes, flat_params)
            case ast.Assign(targets=[ast.Subscript() as own], value=ast.Call(args=[same, _]) as call):
                demand_same(same, ast.unparse(own))
                self._scope.value(call)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="update")) as call) if self._trains:
                self._update(call)
            case ast.For() if not self._program.pipeline:
                self._microbatches(stmt)
            case _:
                raise wrong(stmt, f"nothing in the IR does `{ast.unparse(stmt)}`")

    def _bind(self, target: ast.expr, values: list[Seen]) -> None:
        names = targets(target)
        demand(target, not (GIVEN | self._scope.unread) & set(names), f"binds {names} anew")
        self._scope.unread |= {name for name, value in zip(names, values, strict=True) if not isinstance(value, str)}
        self._scope.env.update(zip(names, values, strict=True))

    def _return(self, stmt: ast.stmt) -> None:
        match stmt:
            case ast.Return(value=ast.Call(func=ast.Name(id="Metrics"), args=[]) as call):
                self._scope.names.demand(stmt, "Metrics")
                for key, node in keywords(call, *self._returns).items():
                    wanted = self._ops.first(self._returns[key])
                    demand(node, self._scope.value(node) == wanted, f"`{key}` is not {wanted}")
            case _:
                raise wrong(stmt, "does not return metrics by name")

    # ---- microbatches

    def _microbatches(self, stmt: ast.For) -> None:
        """The loop that runs forward, and in training backward, of each microbatch, and adds up the loss."""
        demand(stmt, not self._scope.ran, "runs the microbatches twice")
        inputs = targets(stmt.target)
        total, part, args, seed = self._parts(stmt)
        body = f"{total} += model({args})"
        if self._trains:
            factors = " * ".join(map(ast.unparse, seed))
            body = f"{part} = model({args})\n    ({part} * {factors}).backward()\n    {total} += {part}.detach()"
            self._seed(stmt, seed)
        demand_same(stmt, f"for {', '.join(inputs)} in batch.microbatches():\n    {body}")
        known = self._inputs()
        demand(stmt, len(inputs) == len(known), f"{len(known)} inputs, not {len(inputs)}")
        by_name = dict(zip(inputs, known, strict=True))
        if not self._trains:  # nothing is dropped
            by_name = {name: given for name, given in by_name.items() if given != "draws"} | {"None": "draws"}
        by_name = {name: "flat_params" for name, value in self._scope.env.items() if value == FLATS} | by_name
        self.given = tuple(by_name.get(arg, "") for arg in args.split(", "))
        self._scope.unread -= {*args.split(", ")}
        names = [name for name in (*inputs, part, total, *map(ast.unparse, seed)) if name]
        demand(stmt, len({*names, *GIVEN}) == len(names) + len(GIVEN), "uses a name twice")
        self._sum(stmt, total)
        self._scope.ran = True
        self._scope.env = {name: value for name, value in self._scope.env.items() if name not in (*inputs, part)}

    def _inputs(self) -> list[str]:
        """What the model takes of each microbatch."""
        taken = {base(arg.value.name) for arg in self._region.args}
        return [name for name in INPUTS if name in taken]

    def _rows(self, loss: str, call: ast.Call) -> None:
        """`loss = PIPELINE.run(model, batch, share, mesh)`: the rows that do the same in the order of a schedule."""
        demand(call, not self._scope.ran, "runs the microbatches twice")
        self._scope.names.demand(call, "PIPELINE")
        demand(call, self._scope.env.get("mesh") == MESH, "there is no mesh yet")
        demand(call, loss not in GIVEN | self._scope.unread, f"binds `{loss}` anew")
        if self._trains:
            demand(call, len(call.args) >= 4, "is not given model, batch, what backward begins from, and mesh")
            seed = call.args[2]
            given = ", ".join([ast.unparse(seed), "mesh", *self._chunks(call, FLATS, REDUCTIONS)])
            demand_same(call, f"PIPELINE.run(model, batch, {given})")
            self._seed(call, _factors(seed))
        else:
            demand_same(call, f"PIPELINE.evaluate({', '.join(['model', 'batch', 'mesh', *self._chunks(call, FLATS)])})")
        self.given = tuple(self._inputs())
        self._scope.env[loss] = self._region.results[0].name
        self._scope.ran = True

    def _chunks(self, call: ast.Call, *given: Mark) -> list[str]:
        """The names of what is given besides where anything of chunks moves: their buffers, and their reductions."""
        if not self._scope.state.reductions():
            return []
        names = [name for mark in given for name, value in self._scope.env.items() if value == mark]
        demand(call, len(names) == len(given), "is not given chunks and how they are reduced, of each one")
        self._scope.unread -= {*names}
        return names

    def _parts(self, stmt: ast.For) -> tuple[str, str, str, list[ast.expr]]:
        """The names of the sum and of one part, the model's arguments, and the factors of what backward begins from."""
        match stmt.body:
            case [
                ast.Assign(targets=[ast.Name(id=part)], value=ast.Call(args=args)),
                ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.BinOp(op=ast.Mult()) as seed))),
                ast.AugAssign(target=ast.Name(id=total)),
            ] if self._trains:
                return total, part, ", ".join(map(ast.unparse, args)), _factors(seed)[1:]
            case [ast.AugAssign(target=ast.Name(id=total), value=ast.Call(args=args))] if not self._trains:
                return total, "", ", ".join(map(ast.unparse, args)), []
            case _:
                raise wrong(stmt, "a microbatch is other than forward, backward and sum")

    def _seed(self, stmt: ast.AST, factors: list[ast.expr]) -> None:
        """The one value of the step, but for leaves, that the backward block reads is what backward is given."""
        made = {self._ops.first(v.name) for op in self._program.region.body if isinstance(op, Op) for v in op.outputs}
        read = {self._ops.first(name) for op in walk(self._backward.body) for name in op.inputs} & made
        seeds = read - {p.name for p in self._program.params}
        alone = len(factors) == 1
        given = self._scope.tensor(factors[0]) if alone else self._scope.take(factors[0], "mul", factors)
        demand(stmt, {given} == seeds, f"backward begins from {given}, not {', '.join(seeds)}")

    def _sum(self, stmt: ast.stmt, name: str) -> None:
        zero, loss = self._scope.env.get(name), self._region.results[0]
        like = (zero.type.dtype, zero.type.dims) if isinstance(zero, Zero) else None
        demand(stmt, like == (loss.type.dtype, loss.type.dims), f"`{name}` does not begin as a zero of the loss' kind")
        self._scope.unread.discard(name)
        self._scope.env[name] = loss.name

    # ---- the update

    def _update(self, call: ast.Call) -> None:
        """One call for the updates of all buckets."""
        scales = bool(self._program.train.optimizer.clip or self._scale)
        wanted = (*(("scale",) if scales else ()), "skip", *(("overflow",) if self._scale else ()))
        given = keywords(call, *wanted)
        arguments = [f"{name}={ast.unparse(given[name])}" for name in given]
        demand_same(call, f"state.update({', '.join(['lr', *arguments])})")
        scale = self._scope.tensor(given["scale"]) if scales else self._scope.unclipped(call)
        skip = given["skip"]
        count = skip.left if isinstance(skip, ast.Compare) else skip
        demand_same(skip, f"{ast.unparse(count)} == 0")
        counted = self._finite(given["overflow"], count) if self._scale else self._scope.tensor(count)
        for bucket in self._program.buckets:
            inputs = [self._scope.state.gradients.get(bucket.name, ""), scale, counted, *bucket.params]
            self._ops.take(call, "update", inputs, {"bucket": bucket.name})

    def _finite(self, overflow: ast.expr, count: ast.expr) -> str:
        """The count by which the update goes, which is 0 where the norm says that there is an overflow."""
        match overflow:
            case ast.UnaryOp(operand=ast.Call(func=ast.Attribute(value=norm))):
                demand_same(overflow, f"~({ast.unparse(norm)}).isfinite()")
                return self._scope.take(overflow, "if_finite", [count, norm])
            case _:
                raise wrong(overflow, f"`{ast.unparse(overflow)}` is not whether a norm is finite")


def _factors(node: ast.expr) -> list[ast.expr]:
    """The operands of a product, in order."""
    match node:
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return [*_factors(left), right]
        case _:
            return [node]
