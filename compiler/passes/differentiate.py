"""Makes the whole training step of a forward model: backward, accumulation, norm, clipping, update.

Purpose: step { leaves, count → microbatches { forward, backward } → leaf gradients → norm → clip → update }.
Every forward coercion has its conjugate in backward; a value's gradient is placed by the dual of its placement.
Before: `insert_collectives`.  Non-goals: how leaves are made and their gradients reduced (`place_state`).
"""

from collections.abc import Sequence

from attrs import evolve

from ..ir import (
    FLOATS,
    INVARIANT,
    REPLICATED,
    Arg,
    Attr,
    Enter,
    Kind,
    Leave,
    Names,
    Op,
    Param,
    Program,
    Region,
    Stmt,
    Type,
    Value,
    Yield,
    bound,
    walk,
)
from ..ops import OPS
from ..placements import Step, conjugate, dual_type, ends, path

MICROBATCHES = "microbatches"


def differentiate(program: Program) -> Program:
    """The program of the step."""
    return evolve(program, region=_Step(program).region())


class _Writer:
    """Appends typed ops to a body; all writers of a program share names and types."""

    def __init__(self, program: Program, names: Names, types: dict[str, Type]) -> None:
        self.program, self.names, self.types = program, names, types
        self.out: list[Stmt] = []

    def write(
        self, kind: str, inputs: Sequence[str], like: Sequence[str], span: Op | Region | Param, **attrs: Attr
    ) -> tuple[str, ...]:
        """Appends an op with results named like `like`."""
        op = Op(kind, tuple(inputs), (), tuple(attrs.items()), span=span.span)
        types = OPS[kind].infer(self.program, [self.types[name] for name in inputs], op)
        return self.append(evolve(op, outputs=tuple(self.value(n, t) for n, t in zip(like, types, strict=True))))

    def append(self, op: Op) -> tuple[str, ...]:
        """Appends an op as it is."""
        self.out.append(op)
        return tuple(value.name for value in op.outputs)

    def value(self, like: str, type: Type) -> Value:
        """A new value."""
        value = Value(self.names.fresh(like), type)
        self.types[value.name] = type
        return value

    def coerce(self, name: str, step: Step, at: Op | Region | Param) -> str:
        """Appends a coercion of `name`."""
        attrs: dict[str, Attr] = {"axes": step.axes, "from": step.source, "to": step.target}
        return self.write("coerce", [name], [name], at, **attrs)[0]

    def reduced(self, name: str, at: Op | Region | Param) -> str:
        """`name` with its pending sums done."""
        type = self.types[name]
        want = tuple((axis, place) for axis, place in type.places if place.kind is not Kind.PARTIAL)
        for step in path(self.program, type, want):
            name = self.coerce(name, step, at)
        return name


def gradient_name(name: str) -> str:
    """What the gradient of `name` is called."""
    return f"d_{name}"


class _Backward(_Writer):
    """Writes the backward of one body; the `Builder` that adjoints write with."""

    def __init__(
        self, program: Program, names: Names, types: dict[str, Type], outer: "_Backward | None" = None
    ) -> None:
        super().__init__(program, names, types)
        self._outer = outer
        self._parts: dict[str, list[str]] = {}  # gradients of a value so far
        self._made_by: dict[str, Op] = {}
        self._inside: set[str] = set()  # names bound in this body
        self._saved: dict[str, str] = {}
        self._at: Op | Region | None = None
        self._region: Region | None = None  # the repeat whose body this is
        self.slices: list[Arg] = []  # what the backward repeat reads of each iteration
        self.stacks: list[tuple[str, Value]] = []  # what the forward repeat must keep of each

    # ---- the Builder of the op protocol

    def emit(self, kind: str, inputs: Sequence[str], like: Sequence[str], **attrs: Attr) -> tuple[str, ...]:
        assert self._at, "differentiate: no op is being differentiated"
        return self.write(kind, inputs, [gradient_name(name) for name in like], self._at, **attrs)

    def type(self, name: str) -> Type:
        return self.types[name]

    def wanted(self, name: str) -> bool:
        return self.types[name].dtype in FLOATS

    def saved(self, name: str) -> str:
        if name not in self._saved:
            self._saved[name] = self._keep(name)
        return self._saved[name]

    def _keep(self, name: str) -> str:
        """How backward gets at a forward value: it is visible, gathered again, or kept by the repeat."""
        op = self._made_by.get(name)
        if op and op.kind == "coerce" and self.program.train.gathered == "regather" and _gathers(op):
            again = self.write("coerce", [self.saved(op.inputs[0])], [name], op, **dict(op.attrs))
            return again[0]
        if self._region is None:
            return name
        assert self._outer, "differentiate: a repeat stands in no body"
        if name not in self._inside:
            return self._outer.saved(name)
        slices = {arg.value.name: arg.source for arg in self._region.args if arg.enter is Enter.EACH}
        source = slices.get(name) or self._stack(name, self._region.dim)
        value = self.value(name, self.types[name])
        self.slices.append(Arg(value, self._outer.saved(source), Enter.EACH))
        return value.name

    def _stack(self, name: str, dim: str) -> str:
        """The stack of `name` over all iterations, which the forward repeat is made to return."""
        assert self._outer, "differentiate: a repeat stands in no body"
        value = self.value(name, self.types[name].stacked(dim))
        self.stacks.append((name, value))
        self._outer._inside.add(value.name)
        return value.name

    # ---- the walk

    def body(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """Writes the backward of `body`; returns `body` with repeats that keep what backward needs."""
        self._made_by |= {value.name: op for op in body if isinstance(op, Op) for value in op.outputs}
        self._inside |= set(self._made_by) | {v.name for r in body if isinstance(r, Region) for v in r.results}
        forward = [self._stmt(stmt) for stmt in reversed(body)]
        return tuple(reversed(forward))

    def add(self, name: str, part: str) -> None:
        """`part` is (a part of) the gradient of `name`."""
        self._parts.setdefault(name, []).append(part)

    def total(self, name: str, at: Op | Region) -> str | None:
        """The gradient of `name`, all parts added; None where nothing depends on it."""
        parts = self._parts.pop(name, [])
        if len(parts) > 1:
            return self.write("add", parts, [gradient_name(name)], at)[0]
        return parts[0] if parts else None

    def _stmt(self, stmt: Stmt) -> Stmt:
        self._at = stmt
        if isinstance(stmt, Region):
            return self._repeat(stmt)
        grads = [self.total(value.name, stmt) for value in stmt.outputs]
        if any(grads):
            assert all(grads), f"differentiate: only some results of {stmt.kind} have gradients"
            self._op(stmt, [grad for grad in grads if grad])
        return stmt

    def _op(self, op: Op, grads: list[str]) -> None:
        if op.kind == "coerce":
            source, target = conjugate(*ends(op))
            self.add(op.inputs[0], self._conjugate(op, grads[0], Step(op.names("axes"), source, target)))
            return
        adjoint = OPS[op.kind].adjoint
        assert adjoint, f"differentiate: {op.kind} has no adjoint"
        for name, grad in zip(op.inputs, adjoint(op, grads, self), strict=True):
            if grad:
                self.add(name, grad)

    def _conjugate(self, op: Op, grad: str, step: Step) -> str:
        attrs: dict[str, Attr] = {"axes": step.axes, "from": step.source, "to": step.target}
        return self.write("coerce", [grad], [gradient_name(op.inputs[0])], op, **attrs)[0]

    def _repeat(self, region: Region) -> Region:
        """The backward of a repeat is a repeat from the last iteration to the first."""
        carried = [arg for arg in region.args if arg.enter is Enter.CARRY]
        incoming = [self.total(result.name, region) for result in region.results]
        if not any(incoming):
            return region
        incoming = [g or self.zeros(v.name, region) for g, v in zip(incoming, region.results, strict=True)]
        inner = _Backward(self.program, self.names, self.types, self)
        inner._region = region
        inner._inside = {arg.value.name for arg in region.args}
        entering = [inner.value(grad or "", self.types[grad or ""]) for grad in incoming]
        args = [Arg(value, grad or "", Enter.CARRY) for value, grad in zip(entering, incoming, strict=True)]
        for end, value in zip(region.yields, entering, strict=True):
            inner.add(end.name, value.name)
        body = inner.body(region.body)
        ends_ = [
            Yield(inner.total(arg.value.name, region) or inner.zeros(arg.value.name, region), Leave.LAST)
            for arg in carried
        ]
        sources = [arg.source for arg in carried]
        for name in inner.captured():
            args.append(self._accumulate(name, inner, region))
            sum_ = inner.total_with(args[-1].value.name, name, region)
            ends_.append(Yield(sum_, Leave.LAST))
            sources.append(name)
        for arg in region.args:
            grad = inner.total(arg.value.name, region) if arg.enter is Enter.EACH else None
            if grad:
                ends_.append(Yield(grad, Leave.STACK))
                sources.append(arg.source)
        results = tuple(self._result(end, source, region.dim) for end, source in zip(ends_, sources, strict=True))
        for value, source in zip(results, sources, strict=True):
            self.add(source, value.name)
        self.out.append(
            Region(
                "repeat",
                tuple(inner.out),
                (*args, *inner.slices),
                tuple(ends_),
                results,
                region.dim,
                True,
                span=region.span,
            )
        )
        return evolve(
            region,
            body=body,
            yields=(*region.yields, *(Yield(name, Leave.STACK) for name, _ in inner.stacks)),
            results=(*region.results, *(value for _, value in inner.stacks)),
        )

    def captured(self) -> list[str]:
        """Values from outside the repeat that its body uses and that have gradients."""
        assert self._region, "differentiate: only a repeat captures"
        own = {arg.value.name for arg in self._region.args}
        return [name for name in self._parts if name not in own]

    def zeros(self, name: str, at: Region) -> str:
        """A zero gradient of `name`."""
        return self.append(
            Op(
                "zeros",
                (self.saved(name),),
                (self.value(gradient_name(name), dual_type(self.types[name])),),
                (),
                span=at.span,
            )
        )[0]

    def total_with(self, so_far: str, name: str, at: Region) -> str:
        """The gradient of a captured value: what earlier iterations gave, and this one's."""
        self.add(name, so_far)
        total = self.total(name, at)
        assert total, "differentiate: a captured value lost its gradient"
        return total

    def _accumulate(self, name: str, inner: "_Backward", region: Region) -> Arg:
        return Arg(inner.value(gradient_name(name), dual_type(self.types[name])), self.zeros(name, region), Enter.CARRY)

    def _result(self, end: Yield, source: str, dim: str) -> Value:
        type = self.types[end.name]
        return self.value(gradient_name(source), type.stacked(dim) if end.leave is Leave.STACK else type)


def _gathers(op: Op) -> bool:
    source, target = ends(op)
    return source.kind is Kind.SHARDED and target == REPLICATED


class _Step(_Writer):
    """Writes the step around the model."""

    def __init__(self, program: Program) -> None:
        model = program.region
        types = {p.name: p.type for p in program.params} | {arg.value.name: arg.value.type for arg in model.args}
        types |= {v.name: v.type for op in walk(model.body) for v in op.outputs} | _region_types(model)
        super().__init__(program, Names((*(p.name for p in program.params), *bound(model))), types)
        self._model = model
        self._leaves = [op for op in model.body if isinstance(op, Op) and op.kind == "leaf"]

    def region(self) -> Region:
        model = self._model
        inputs = [self.value(arg.value.name, arg.value.type.stacked(MICROBATCHES)) for arg in model.args]
        self.out += self._leaves
        labels = inputs[-1].name
        (counted,) = self.write("count_valid", [labels], ["count"], model)
        count = self.reduced(counted, model)
        loss_type = self.types[model.yields[0].name]
        (share,) = self.write("reciprocal", [count], ["share"], model, dtype=loss_type.dtype)
        loss, grads = self._microbatches(inputs, share)
        (mean,) = self.write("mul", [self.reduced(loss, model), share], [loss], model)
        norm, updated = self._update(grads, count)
        ends_ = tuple(Yield(name, Leave.LAST) for name in (mean, norm, count, *updated))
        args = tuple(Arg(value, value.name, Enter.EACH) for value in inputs)
        return Region("step", tuple(self.out), args, ends_, span=model.span)

    def _microbatches(self, inputs: list[Value], share: str) -> tuple[str, list[str]]:
        """The region of all microbatches; returns the sums of loss and of the leaves' gradients."""
        model, loss = self._model, self._model.yields[0].name
        back = _Backward(self.program, self.names, self.types)
        back.add(loss, self._seed(back, loss, share))
        forward = back.body([stmt for stmt in model.body if stmt not in self._leaves])
        blocks = (
            Region("forward", forward, span=model.span),
            Region("backward", tuple(back.out), span=model.span),
        )
        leaves = [op.outputs[0].name for op in self._leaves]
        parts = [loss, *(back.total(leaf, model) or "" for leaf in leaves)]
        assert all(parts), "differentiate: a parameter has no gradient"
        blocks = (blocks[0], evolve(blocks[1], body=tuple(back.out)))
        ends_ = tuple(Yield(part, Leave.SUM) for part in parts)
        results = tuple(self.value(part, self.types[part]) for part in parts)
        args = tuple(Arg(arg.value, value.name, Enter.EACH) for arg, value in zip(model.args, inputs, strict=True))
        self.out.append(Region("microbatches", blocks, args, ends_, results, MICROBATCHES, span=model.span))
        return results[0].name, [value.name for value in results[1:]]

    def _seed(self, back: _Backward, loss: str, share: str) -> str:
        """The gradient of a microbatch's sum of token losses: one over the step's count of valid tokens."""
        axes = self.types[loss].axes_in(Kind.PARTIAL)
        return back.coerce(share, Step(axes, INVARIANT, REPLICATED), self._model) if axes else share

    def _update(self, grads: list[str], count: str) -> tuple[str, list[str]]:
        params = self.program.params
        final = [self._final(leaf, grad, param) for leaf, grad, param in zip(self._leaves, grads, params, strict=True)]
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in final:
            groups.setdefault(self.types[name].axes_in(Kind.SHARDED), []).append(name)
        squares = [
            self.reduced(self.write("sum_squares", names, ["squares"], self._model)[0], self._model)
            for names in groups.values()
        ]
        (norm,) = self.write("grad_norm", squares, ["norm"], self._model)
        clip = self.program.train.optimizer.clip
        (scale,) = self.write("clip_scale", [norm], ["scale"], self._model, max=float(clip))
        return norm, [
            self.write("update", [g, scale, count, p.name], [p.name], p)[0] for g, p in zip(final, params, strict=True)
        ]

    def _final(self, leaf: Op, grad: str, param: Param) -> str:
        return self.append(Op("leaf_grad", (grad,), (self.value(grad, param.type),), (), span=leaf.span))[0]


def _region_types(region: Region) -> dict[str, Type]:
    types: dict[str, Type] = {}
    for stmt in region.body:
        if isinstance(stmt, Region):
            types |= {arg.value.name: arg.value.type for arg in stmt.args}
            types |= {value.name: value.type for value in stmt.results} | _region_types(stmt)
    return types
